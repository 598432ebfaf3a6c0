"""`elastane logs`: the output of a job's workers, from their files, merged by time on request.

This module owns the command line and the format of a line. It reads a folder, so it works on a
running job and on one that ended long ago.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli.parser import add_job_options
from elastane.errors import ElastaneError, UsageError

if TYPE_CHECKING:
    from elastane.observe.merge import Follower, LogLine, Selection, StreamFile
    from elastane.process.files import JobRegistry

_POLL_S = 0.25
_JOBS_NAMED_MAX = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_job_options(parser)
    add = parser.add_argument
    add(
        "--rank",
        metavar="LIST",
        default="",
        help="only these ranks: 0,2 or 0-3; a replacement keeps the higher number of its start",
    )
    add("--node", metavar="NAMES", default="", help="only these nodes or hosts")
    add("--round", metavar="LIST", default="", help="only these rounds")
    add("--attempt", metavar="LIST", default="", help="only these attempts")
    add("--stdout", action="store_true", help="only the stdout of workers")
    add("--stderr", action="store_true", help="only the stderr of workers")
    add(
        "--merge-by-time",
        action="store_true",
        help="order lines of all workers by time instead of one worker after another",
    )
    add("-f", "--follow", action="store_true", help="keep printing new output until interrupted")


def main(args: argparse.Namespace) -> int:
    """Print the selected output; returns 0 also when the reader of a pipe stops reading."""
    from elastane.observe.merge import Follower, LogCursor, find_streams, merged

    selection = _selection(args)
    folder = find_job(args.job, args.log_dir, "logs")
    if args.follow:
        return _follow(
            Follower(folder, selection, by_time=args.merge_by_time), timed=args.merge_by_time
        )
    streams = find_streams(folder, selection)
    if not streams:
        raise _nothing_kept(folder)
    cursors = [LogCursor(stream) for stream in streams]
    _print(merged(cursors, by_time=args.merge_by_time, partial=True), timed=args.merge_by_time)
    return 0


def find_named_job(args: argparse.Namespace, registry: JobRegistry, verb: str) -> Path | None:
    """Return the folder of the named job, or None; a job that runs here has priority."""
    if not args.job:
        return None
    running = [entry.log_dir for entry in registry.running(args.job) if entry.log_dir]
    return find_job(args.job, args.log_dir or (running[-1] if running else ""), verb).resolve()


def find_job(job: str, log_dir: str, verb: str) -> Path:
    """Return the folder of a job given by name or path; `verb` is the command, for errors."""
    from elastane.process import environment
    from elastane.process.files import safe_name
    from elastane.process.streams.files import default_base_dir

    given = Path(job)
    if given.is_dir():
        if _is_job_dir(given):
            return given
        inside = [path for path in sorted(given.iterdir()) if _is_job_dir(path)]
        if len(inside) == 1:
            return inside[0]
        if inside:
            raise _which_job(job, [str(path) for path in inside], verb)
    base = Path(log_dir or environment.get("PET_LOG_DIR") or default_base_dir())
    folder = base / safe_name(job)
    noted = "" if log_dir else _noted(job)
    if noted and (Path(noted) / safe_name(job)).is_dir():
        folder = Path(noted) / safe_name(job)
    if folder.is_dir():
        return folder
    raise UsageError(
        f"no job {job!r} in {base}",
        slug="no-such-job",
        expected=_jobs_of(base),
        next_step=f"elastane {verb} --log-dir DIR JOB, with the DIR of elastane run",
    )


def _noted(job: str) -> str:
    """Return where a job on this machine logs, or logged before its end; empty if not known."""
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    try:
        return JobRegistry(runtime_folder(environment.snapshot())).logs_of(job)
    except (OSError, ElastaneError):
        return ""


def _jobs_of(base: Path) -> str:
    """Return the jobs of a folder in words, the newest first."""
    jobs = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
    if not jobs:
        return "a folder of logs"
    newest = sorted(jobs, key=lambda path: path.stat().st_mtime, reverse=True)
    more = f" and {len(jobs) - _JOBS_NAMED_MAX} older ones" if len(jobs) > _JOBS_NAMED_MAX else ""
    return f"one of {', '.join(path.name for path in newest[:_JOBS_NAMED_MAX])}{more}"


def _is_job_dir(path: Path) -> bool:
    return any(path.glob("round_*")) or any(path.glob("events.*.jsonl"))


def _which_job(given: str, folders: list[str], verb: str) -> UsageError:
    return UsageError(
        f"{given} holds the logs of {len(folders)} jobs",
        slug="several-jobs",
        expected=f"one of {', '.join(folders[:_JOBS_NAMED_MAX])}",
        next_step=f"elastane {verb} {folders[-1]}",
    )


def _nothing_kept(folder: Path) -> UsageError:
    return UsageError(
        f"{folder} holds no output of the workers that were asked for",
        slug="no-output",
        expected="files of workers, which elastane run makes unless --log-dir is /dev/null",
        next_step="leave out --rank, --node, --round, --attempt, --stdout and --stderr",
    )


def _selection(args: argparse.Namespace) -> Selection:
    from elastane.observe.merge import Selection
    from elastane.process.streams.plan import parse_ranks

    stds = {name for name in ("stdout", "stderr") if getattr(args, name)}
    return Selection(
        ranks=parse_ranks(args.rank, option="--rank"),
        nodes=frozenset(filter(None, args.node.split(","))),
        rounds=parse_ranks(args.round, option="--round"),
        attempts=parse_ranks(args.attempt, option="--attempt"),
        stds=frozenset(stds),
    )


def _follow(follower: Follower, *, timed: bool) -> int:
    try:
        while True:
            _print(follower.poll(), timed=timed)
            sys.stdout.flush()
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 0


def _print(lines: Iterable[LogLine], *, timed: bool) -> None:
    prefix = _prefixes()
    out = sys.stdout.buffer
    for line in lines:
        when = _time_text(line.time_ns) if timed else b""
        out.write(b"%s%s%s\n" % (when, prefix(line.stream), line.text))


def _prefixes() -> Callable[[StreamFile], bytes]:
    """Return a function that makes each file's prefix once."""
    made: dict[Path, bytes] = {}

    def prefix(stream: StreamFile) -> bytes:
        if stream.path not in made:
            who = f"{stream.worker.role or 'rank'}{stream.rank}"
            node = f" {stream.worker.node}" if stream.worker.node else ""
            fence = f"r{stream.fence.round}.{stream.fence.attempt}"
            made[stream.path] = f"[{who}{node} {fence} {stream.std[3:]}]: ".encode()
        return made[stream.path]

    return prefix


def _time_text(time_ns: int) -> bytes:
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    day_time = time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{day_time}.{rest_ns // 1_000_000:03d} ".encode()
