"""The text of a batch script that runs a job, requeues it and lets it lose nodes.

Pure: from a request to the text. The script asks for a notice before the time limit, gives each run
a secret of its own, keeps the step alive when a node or an agent is lost, and reads how the job
ended from the agents' report. UsageError for a value that cannot stand in a script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elastane.errors import ExitCode, UsageError

# Slurm reads the lines of a script by rules of its own: no spaces, quotes or comments in a value.
_PLAIN = re.compile(r"[\w.,:@%/=+\[\]()|&*!~^-]+", re.ASCII)
# A time limit as sbatch takes it: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))", re.ASCII)
_SECONDS = (86_400, 3600, 60, 1, 3600, 60, 1, 60)  # of each group
_NO_LIMIT = ("0", "-1", "infinite", "unlimited")
_SBATCH_WORD = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.ASCII)
# From the end of the workers to that of the last agent: the final flush of snapshots, the report.
MARGIN_S = 15
# The least time for the workers to reach a step and save; a notice has to leave it.
DRAIN_MIN_S = 5
# The run can continue elsewhere or later: it was drained, lost its node or its coordinator.
_CONTINUABLE = (int(ExitCode.NODE_UNFIT), int(ExitCode.TRY_AGAIN), 137, int(ExitCode.DRAINED))


@dataclass(frozen=True)
class ScriptRequest:
    """The content of the script.

    `program` starts elastane, `run_options` are words of `elastane run`, `command` the user's
    script with its arguments. `sbatch` holds further options of sbatch by name, `more` whole words
    for it. `notice_s`: how long before the time limit Slurm warns the job. `requeues`: how often
    the job is requeued at most. `in_store`: a store keeps the job and its secret.
    """

    nodes: tuple[int, int]
    program: tuple[str, ...]
    run_options: tuple[str, ...]
    command: tuple[str, ...]
    name: str
    sbatch: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    notice_s: int = 120
    requeues: int = 100
    report_file: str = ""
    in_store: bool = False
    has_size: bool = False


def batch_script(request: ScriptRequest) -> str:
    """Return the script; UsageError for a value that Slurm would read differently."""
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in _directives(request)), ""]
    lines += [*_BEFORE]
    if not request.in_store:
        lines += _SECRET
    report = shlex.quote(request.report_file) if request.report_file else _REPORT
    lines += [f"report={report}", 'rm -f -- "$report"', "", *_run(request), *_after(request)]
    return "\n".join(lines) + "\n"


def drain_s(notice_s: int, shutdown_s: float) -> int:
    """Return how long the workers may take to save; UsageError if the notice is too short."""
    left = int(notice_s - shutdown_s - MARGIN_S)
    if left < DRAIN_MIN_S:
        raise UsageError(
            f"--notice {notice_s}: no time to save",
            slug="slurm-script",
            expected=f"at least {int(shutdown_s) + MARGIN_S + DRAIN_MIN_S} seconds: the workers' "
            f"last step and save, {shutdown_s:g} s of --shutdown-timeout, {MARGIN_S} s for the "
            "agents",
            next_step="a longer --notice, or a shorter --shutdown-timeout",
        )
    return left


def check_time(limit: str, notice_s: int) -> None:
    """Raise UsageError for a time limit that sbatch refuses, or that the notice fills."""
    if limit.lower() in _NO_LIMIT:
        return
    found = _TIME.fullmatch(limit)
    if found is None:
        raise UsageError(
            f"--time {limit!r}",
            slug="slurm-script",
            expected="minutes, hours:minutes:seconds or days-hours, such as 30, 12:00:00 or 2-00",
            next_step="leave --time out for the time limit of the partition",
        )
    time_s = sum(
        int(part) * each_s for part, each_s in zip(found.groups(default="0"), _SECONDS, strict=True)
    )
    if time_s <= notice_s:
        raise UsageError(
            f"--time {limit} is {time_s} s, and --notice {notice_s}: the job would save at once,"
            " and be requeued",
            slug="slurm-script",
            expected="a time limit longer than the notice; a plain number counts minutes",
            next_step="a longer --time, or a shorter --notice",
        )


def _directives(request: ScriptRequest) -> Iterator[str]:
    low, high = request.nodes
    yield f"--job-name={_plain('job-name', request.name)}"
    # Not --ntasks-per-node: with it, Slurm 22.05 gives MIN nodes however many are free.
    yield f"--nodes={low}" if low == high else f"--nodes={low}-{high}"
    for name, value in request.sbatch.items():
        yield f"--{name}={_plain(name, value)}" if value else f"--{name}"
    yield f"--signal=TERM@{request.notice_s}"
    yield "--requeue"
    yield "--no-kill"
    yield "--open-mode=append"
    for word in request.more:
        if not _SBATCH_WORD.fullmatch(word):
            raise _unplain("sbatch", word, "options of sbatch in one word each: --mail-type=END")
        yield _plain("sbatch", word)


def _run(request: ScriptRequest) -> list[str]:
    low, high = request.nodes
    words = [*map(shlex.quote, request.program), "run"]
    if low < high and not request.has_size:
        words += ["--nnodes", f'"{low}:$SLURM_JOB_NUM_NODES"']
    if not request.report_file:
        words += ["--report-file", '"$report"']
    command = shlex.join((*request.run_options, *request.command))
    return [*_SRUN, f"    {' '.join(words)} \\", f"    {command}", "code=$?"]


def _after(request: ScriptRequest) -> list[str]:
    codes = "|".join(map(str, _CONTINUABLE))
    return [
        "# srun reports the worst end of an agent, the report says how the job ended.",
        'told=$(sed -n \'s/^  "exit_code": \\([0-9]*\\).*/\\1/p\' "$report" 2>/dev/null)',
        "code=${told:-$code}",
        'case "$code" in',
        f"{codes})",
        "    # Drained, or stopped by the loss of a node. A job that Slurm ends is not running.",
        '    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)',
        "    restarts=${SLURM_RESTART_COUNT:-0}",
        f'    if [ "$state" = RUNNING ] && [ "$restarts" -lt {request.requeues} ]; then',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    fi",
        "    ;;",
        "esac",
        'exit "$code"',
    ]


def _plain(name: str, value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    raise _unplain(name, value, "no spaces, quotes or comments")


def _unplain(name: str, value: str, expected: str) -> UsageError:
    return UsageError(
        f"--{name} {value!r} cannot stand in a line of a batch script",
        slug="slurm-script",
        expected=expected,
        next_step=f"give it to sbatch itself: sbatch --{name}=... SCRIPT",
    )


_REPORT = '"slurm-$SLURM_JOB_ID.outcome.json"'
_BEFORE = (
    "# The shell waits for the agents, which save and leave when Slurm ends the job.",
    "trap : TERM",
    "# Slurm hands the CPUs of a task to steps only by this variable.",
    'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then',
    '    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    "fi",
)
_SECRET = (
    "# A secret for this run: no agent of the run before a requeue can join.",
    "ELASTANE_TOKEN=$(head -c 32 /dev/urandom | base64 --wrap=0)",
    "export ELASTANE_TOKEN",
)
_SRUN = (
    "# One agent on each node. The loss of one ends neither the others nor the step.",
    'srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\',
    "    --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 \\",
)
