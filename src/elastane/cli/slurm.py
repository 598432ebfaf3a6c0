"""`elastane slurm`: print a batch script for sbatch, which runs, requeues and continues a job."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from pathlib import PurePath

from elastane.cli._scheduler_options import add_run_options, own_option, parser_with, value_of
from elastane.errors import UsageError
from elastane.options.parser import RunParser, read, words_of
from elastane.options.table import Option

SLURM = "Slurm: what sbatch is asked for"
_option = functools.partial(own_option, SLURM)
# Options about the output of a command, which do not belong into a batch script.
_NOT_FOR_JOBS = ("show_config", "json")
_SHUTDOWN_S = 30.0  # the default of --shutdown-timeout


# Options that sbatch gets under the same names.
_PASSED = (
    _option("time", "", "time limit, as sbatch takes it: 30, 12:00:00, 2-00", "TIME"),
    _option("partition", "", "partition, or several with commas", "NAME"),
    _option("account", "", "account that is charged", "NAME"),
    _option("qos", "", "quality of service", "NAME"),
    _option("constraint", "", "features that each node has to have", "LIST"),
    _option("gpus-per-node", "", "GPUs of each node, as N or TYPE:N", "N"),
    _option("cpus-per-task", "", "CPUs of each node's agent and its workers", "N"),
    _option("mem", "", "memory of each node, such as 64G; 0: all of it", "SIZE"),
    _option("array", "", "job array: each task is a job of its own", "LIST"),
    _option("output", "", "file for the output, with sbatch's patterns (%j)", "FILE"),
    _option("exclusive", "0", "share no node with other jobs", kind="flag"),
)
OPTIONS = (
    _option("nodes", "1", "number of nodes, or MIN:MAX: Slurm gives what it can", "N|MIN:MAX"),
    _option("job-name", "", "name in Slurm's lists (default: that of the script)", "NAME"),
    *_PASSED,
    _option("notice", "120", "seconds before the time limit at which the job saves", "S", "int"),
    _option("requeues", "100", "restarts after which the job is not requeued", "N", "int"),
    _option("sbatch", "", "further options for sbatch, in one text", "TEXT"),
)
_EPILOG = """\
examples:
  {prog} --nodes 4 --time 12:00:00 --gpus-per-node 8 train.py --lr 0.1 | sbatch
      four nodes, one worker for each GPU
  {prog} --nodes 1:4 --partition preempt --max-restarts 100 train.py > job.sbatch
      whatever part of four nodes is free; a lost node does not end the job

Write the options of Slurm and of elastane run before the script, in any order. The job saves
--notice seconds before its time limit, and is requeued; see docs/slurm.md."""


Parser = parser_with(OPTIONS)


def configure(parser: RunParser) -> None:
    """Add Slurm's options, then those of `elastane run`."""
    add_run_options(parser, _EPILOG)


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(script_of(args, (sys.executable, "-m", "elastane")))
    return 0


def script_of(args: argparse.Namespace, program: tuple[str, ...]) -> str:
    """Return the script; `program` are the words that start elastane on the nodes."""
    from elastane.options.build import read_nnodes
    from elastane.slurm.script import ScriptRequest, batch_script, check_time, drain_s
    from elastane.stores import registry

    for dest in _NOT_FOR_JOBS:
        if hasattr(args, dest):
            raise UsageError(
                f"--{dest.replace('_', '-')} is for elastane run",
                slug="usage",
                expected="options of Slurm and of the job",
                next_step="leave the option out: a batch script runs later, on other machines",
            )
    options = read(args, {})
    shutdown_s = options.seconds("shutdown_timeout")
    notice_s = _whole(args, "notice")
    if limit := value_of(args, OPTIONS, "time"):
        check_time(limit, notice_s)
    words = words_of(options)
    room_s = drain_s(notice_s, _SHUTDOWN_S if shutdown_s is None else shutdown_s)
    if "drain_timeout" not in options.given:
        words += ["--drain-timeout", str(room_s)]
    request = ScriptRequest(
        nodes=read_nnodes(value_of(args, OPTIONS, "nodes")),
        program=program,
        run_options=tuple(words),
        command=(options.script, *options.script_args),
        name=value_of(args, OPTIONS, "job_name") or PurePath(options.script).stem or "job",
        sbatch={option.name: _sbatch_value(args, option) for option in _given(args)},
        more=tuple(shlex.split(value_of(args, OPTIONS, "sbatch"))),
        notice_s=notice_s,
        requeues=_whole(args, "requeues"),
        report_file=options.text("report_file"),
        in_store=registry.is_store(options.text("rdzv_backend").lower()),
        has_size="nnodes" in options.given,
    )
    return batch_script(request)


def _given(args: argparse.Namespace) -> list[Option]:
    return [option for option in _PASSED if hasattr(args, option.dest)]


def _sbatch_value(args: argparse.Namespace, option: Option) -> str:
    return "" if option.kind == "flag" else str(getattr(args, option.dest))


def _whole(args: argparse.Namespace, dest: str) -> int:
    text = value_of(args, OPTIONS, dest)
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"--{dest} = {text!r}",
            slug="bad-option-value",
            expected="a whole number, 0 or more",
            next_step=f"see elastane slurm --help for --{dest}",
        )
    return int(text)
