"""`elastane logs`: the output of a job's workers, from their files, merged by time on request.

This module owns the command line and the format of a line. It reads a folder, so it works on a
running job and on one that ended long ago.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.cli.parser import add_job_options
from elastane.errors import ElastaneError, UsageError

if TYPE_CHECKING:
    from elastane.observe.merge import Follower, LogLine, RankTerm, Selection, StreamFile
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
        help="only what these ranks printed: 0,2 or 0-3; a line says where another worker became"
        " the rank",
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
        return _follow(Follower(folder, selection, by_time=args.merge_by_time), _Printer(args))
    streams = find_streams(folder, selection)
    if not streams:
        raise _nothing_kept(folder)
    cursors = [LogCursor(stream) for stream in streams]
    _Printer(args).print(merged(cursors, by_time=args.merge_by_time, partial=True))
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


def _follow(follower: Follower, printer: _Printer) -> int:
    try:
        while True:
            printer.print(follower.poll())
            sys.stdout.flush()
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 0


class _Printer:
    """Prints lines, each with the worker's rank at that time, and the changes of selected ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._timed = args.merge_by_time
        self._marks = bool(args.rank)
        self._prefixes: dict[tuple[Path, RankTerm], bytes] = {}
        self._workers: dict[int, StreamFile] = {}  # by rank, the one that printed last

    def print(self, lines: Iterable[LogLine]) -> None:
        """Print lines to stdout."""
        out = sys.stdout.buffer
        for line in lines:
            when = _time_text(line.time_ns) if self._timed else b""
            if self._marks and (mark := self._change(line)):
                out.write(b"%s%s\n" % (when, mark))
            out.write(b"%s%s%s\n" % (when, self._prefix(line), line.text))

    def _prefix(self, line: LogLine) -> bytes:
        """Return the prefix of a line, which is made once for each worker and rank."""
        stream, term = line.stream, line.term
        key = stream.path, term
        if key not in self._prefixes:
            who = f"{stream.worker.role or 'rank'}{term.rank}"
            node = f" {stream.worker.node}" if stream.worker.node else ""
            fence = f"r{term.fence.round}.{term.fence.attempt}"
            self._prefixes[key] = f"[{who}{node} {fence} {stream.std[3:]}]: ".encode()
        return self._prefixes[key]

    def _change(self, line: LogLine) -> bytes:
        """Return a line that says which worker a rank is from here on; empty if it is the same."""
        rank, stream = line.term.rank, line.stream
        before = self._workers.get(rank)
        self._workers[rank] = stream
        if before is None or before.path.parent == stream.path.parent:
            return b""
        fence = line.term.fence
        return (
            f"--- rank {rank} is {_worker_text(stream)}, from round {fence.round} attempt"
            f" {fence.attempt} on; before: {_worker_text(before)} ---"
        ).encode()


def _worker_text(stream: StreamFile) -> str:
    node = f" on node {stream.worker.node}" if stream.worker.node else ""
    return f"local rank {stream.worker.local_rank}{node}, started in round {stream.fence.round}"


def _time_text(time_ns: int) -> bytes:
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    day_time = time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{day_time}.{rest_ns // 1_000_000:03d} ".encode()
