"""Worker output of one start of a local worker group: its descriptors, and their end.

This module decides which descriptor each stream gets. If a log folder fails, the worker still
starts, with its output on the console and one warning for the group. It knows nothing of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastane.process.offload import Offload
from elastane.process.streams.bounds import FINISH_S, OPEN_S
from elastane.process.streams.capture import Capture, KeptFile, Pump
from elastane.process.streams.console import process_console
from elastane.process.streams.files import (
    ensure_base_dir,
    fresh_error_file,
    make_rank_dir,
    note_place,
    open_append,
)
from elastane.process.streams.plan import (
    GroupFiles,
    LogPlan,
    StreamChoice,
    WorkerFiles,
    WorkerPlace,
    filtered_name,
    planned,
)
from elastane.process.streams.tailer import Filtered, Tail, Tailer
from elastane.protocol.model import Fence

_log = logging.getLogger("elastane.streams")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CONSOLE_FDS = {StreamChoice.OUT: 1, StreamChoice.ERR: 2}


@dataclass(frozen=True, slots=True)
class WorkerStreams:
    """The streams that one worker is started with; a path is empty if there is no file.

    The group keeps the descriptors; the worker gets duplicates. `stderr_tail`: where this process
    reads the last lines of stderr, even without a file that a user could open.
    """

    stdout: int
    stderr: int
    stdout_path: str = ""
    stderr_path: str = ""
    error_file: str = ""
    stderr_tail: str = ""


class GroupStreams:
    """The streams of all workers of one node in one attempt."""

    def __init__(
        self, plan: LogPlan, job: str, node: str, fence: Fence, offload: Offload | None = None
    ) -> None:
        self._plan = plan
        self._job = job
        self._node = node
        self._fence = fence
        self._ends: list[int] = []
        self._warned = False
        self._gave_up = False
        self._files: GroupFiles | None = None
        self._captures: dict[str, Capture] = {}
        self._folders: dict[int, tuple[Path, WorkerPlace]] = {}  # by local rank
        self._offload = offload or Offload()
        self._tailer = Tailer(f"streams-{fence.round}.{fence.attempt}")
        self._pump = Pump(f"stderr-{fence.round}.{fence.attempt}")

    def choose(self, files: GroupFiles) -> None:
        """Use the destinations in `files` instead of the plan's."""
        self._files = files

    def chosen_env(self, local_rank: int) -> Mapping[str, str]:
        """Return the environment variables that the choice of files has changed for a worker."""
        return self._files.workers[local_rank].env if self._files else {}

    async def open_soon(self, local_rank: int, rank: int, role: str) -> WorkerStreams:
        """Open the streams of one worker, off the event loop and within `OPEN_S`.

        If the log folder hangs, this group has no files from then on and uses the console.
        """
        if not self._gave_up:
            try:
                opening = partial(self._open_files, local_rank, rank, role)
                return self._captured(*await self._offload.run(opening, OPEN_S))
            except TimeoutError:
                self._gave_up = True
                self._warn(Path(self._plan.base_dir), OSError(f"no answer within {OPEN_S:g} s"))
        return self.open(local_rank, rank, role)

    def open(self, local_rank: int, rank: int, role: str) -> WorkerStreams:
        """Open the streams of one worker, before it starts; may block on the log folder."""
        return self._captured(*self._open_files(local_rank, rank, role))

    async def note_rank(self, local_rank: int, rank: int, fence: Fence, time_ns: int) -> None:
        """Record in the worker's folder that it has another rank from a time on, for its readers.

        If that fails, its lines keep the former rank, and nothing else is lost.
        """
        found = self._folders.get(local_rank)
        if found is None or self._gave_up:
            return
        folder, place = found[0], replace(found[1], rank=rank, fence=fence)
        note = partial(note_place, folder, place, socket.gethostname(), time_ns)
        with contextlib.suppress(OSError, TimeoutError):
            await self._offload.run(note, OPEN_S)

    def _open_files(
        self, local_rank: int, rank: int, role: str
    ) -> tuple[WorkerStreams, dict[StreamChoice, KeptFile]]:
        """Return the streams of one worker, and the files for copies of those on the console."""
        place = WorkerPlace(self._fence, local_rank, rank, role, self._node)
        files = self._files_of(place)
        stdout, stdout_path = self._open_stream(place, StreamChoice.OUT, files)
        stderr, stderr_path = self._open_stream(place, StreamChoice.ERR, files)
        streams = WorkerStreams(stdout, stderr, stdout_path, stderr_path, files.error_file)
        return streams, self._keep({StreamChoice.OUT: stdout, StreamChoice.ERR: stderr}, files)

    def _keep(
        self, opened: Mapping[StreamChoice, int], files: WorkerFiles
    ) -> dict[StreamChoice, KeptFile]:
        """Open files for copies of the streams that go to the console."""
        kept = {}
        for std, fd in opened.items():
            path = files.kept.get(std, "")
            if not path or fd not in _CONSOLE_FDS.values() or self._gave_up:
                continue
            kept[std] = KeptFile(Path(path), self._warn_kept)
            try:
                kept[std].open()
            except OSError as error:
                self._warn(Path(path), error)
                del kept[std]
        return kept

    def _captured(
        self, streams: WorkerStreams, kept: Mapping[StreamChoice, KeptFile]
    ) -> WorkerStreams:
        """Capture stderr so that its tail can be read, and every stream that has a copy.

        Without a copy, a terminal stays the worker's own.
        """
        if StreamChoice.OUT in kept:
            write, _ = self._capture(streams.stdout, kept[StreamChoice.OUT])
            streams = replace(streams, stdout=write, stdout_path=str(kept[StreamChoice.OUT].path))
        if streams.stderr_path:
            return replace(streams, stderr_tail=streams.stderr_path)
        file = kept.get(StreamChoice.ERR)
        shown = streams.stderr in _CONSOLE_FDS.values()
        if shown and file is None and os.isatty(streams.stderr):
            return streams
        write, tail = self._capture(streams.stderr, file)
        path = str(file.path) if file is not None else ""
        return replace(streams, stderr=write, stderr_path=path, stderr_tail=tail)

    def _capture(self, fd: int, kept: KeptFile | None) -> tuple[int, str]:
        """Return the descriptor for a worker to write to instead of `fd`, and its tail's path."""
        shown = fd in _CONSOLE_FDS.values()
        capture = Capture(process_console(fd) if shown else None, kept)
        write = capture.open()
        self._ends.append(write)
        self._captures[capture.tail_path] = capture
        self._pump.add(capture)
        return write, capture.tail_path

    def close_worker_ends(self) -> None:
        """Close the descriptors that `open` made; call it once the workers have theirs."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()

    def drain(self, streams: WorkerStreams) -> None:
        """Wait, within a bound, until `stderr_tail` has all output of a worker that has ended."""
        capture = self._captures.get(streams.stderr_tail)
        if capture is not None:
            self._pump.drain(capture)

    async def finish(self) -> None:
        """Display the last output of the workers, once they are gone; takes at most `FINISH_S`.

        May be called again, and without any worker having started.
        """
        self.close_worker_ends()
        tailer, pump = self._tailer, self._pump
        self._tailer, self._pump = Tailer("streams-ended"), Pump("stderr-ended")
        self._captures.clear()
        await asyncio.gather(*(_end(each) for each in (tailer, pump) if each.is_running))

    def _files_of(self, place: WorkerPlace) -> WorkerFiles:
        if self._files is not None and not self._gave_up:
            return self._files.workers[place.local_rank]
        folder = self._make_folder(place)
        return planned(self._plan, place, folder, fresh_error_file(folder) if folder else "")

    def _make_folder(self, place: WorkerPlace) -> Path | None:
        if not self._plan.has_files or self._gave_up:
            return None
        folder = self._plan.rank_dir(self._job, place.fence, place.rank)
        try:
            ensure_base_dir(self._plan.base_dir)
            make_rank_dir(folder, place, socket.gethostname())
        except OSError as error:
            self._warn(folder, error)
            return None
        self._folders[place.local_rank] = folder, place
        return folder

    def _open_stream(
        self, place: WorkerPlace, std: StreamChoice, files: WorkerFiles
    ) -> tuple[int, str]:
        """Return the descriptor for a stream, and the path of its file if it has one."""
        path = files.paths.get(std, "")
        if path and path != os.devnull:
            try:
                return self._open_file(place, std, Path(path), tee=std in files.tees), path
            except OSError as error:
                self._warn(Path(path), error)
        if path != os.devnull and self._plan.shows(place.local_rank):
            return _CONSOLE_FDS[std], ""
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._ends.append(fd)
        return fd, ""

    def _open_file(self, place: WorkerPlace, std: StreamChoice, path: Path, *, tee: bool) -> int:
        fd = open_append(path)
        if self._gave_up:
            os.close(fd)
            raise TimeoutError("opened too late")
        self._ends.append(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return fd  # A class may choose a device or a pipe, which has no history to read.
        prefix = self._plan.line_prefix(place)
        tail = Tail(path, process_console(_CONSOLE_FDS[std]) if tee else None, prefix)
        tail.open()
        self._tailer.add(tail)
        if tee and self._plan.needles.get(std):
            self._filter(std, path, place)
        return fd

    def _filter(self, std: StreamChoice, source: Path, place: WorkerPlace) -> None:
        prefix, name = (
            self._plan.line_prefix(place),
            filtered_name(std, place.rank - place.local_rank),
        )
        default = str(self._plan.attempt_dir(self._job, self._fence) / name)
        target = self._files.filtered.get(std, "") if self._files else default
        filtered = Filtered(source, Path(target), self._plan.needles[std], prefix)
        try:
            filtered.open()
        except OSError as error:
            _log.warning("no lines are copied to %s: %s", target, error.strerror or error)
        else:
            self._tailer.add(filtered)

    def _warn_kept(self, path: Path, error: OSError) -> None:
        """Warn once that only the console has the rest of the output."""
        if not self._warned:
            self._warned = True
            _log.warning("%s: no more is kept: %s [log-dir]", path, error.strerror or error)

    def _warn(self, path: Path, error: OSError) -> None:
        """Warn once for the group that files fail; the other files fail for the same cause."""
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "node %s, %s: no log files: %s: %s; output goes to the console instead. "
            "Next: %s, or give another --log-dir [log-dir]",
            self._node,
            self._fence,
            path,
            error.strerror or error,
            "free space there" if error.errno in _FULL else "make that a folder you can write to",
        )


async def _end(each: Tailer | Pump) -> None:
    """Let a thread display the rest; a thread that a file system blocks is left behind."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def notify_done() -> None:
        # If the loop has ended, no caller waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    stop: Callable[[Callable[[], None]], None] = each.stop
    stop(notify_done)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINISH_S * 2):
            await done.wait()
