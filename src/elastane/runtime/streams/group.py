"""Worker output of one start of a local worker group: descriptors to hand out, and their end.

It owns the decision which descriptor each stream gets, and what happens when a log folder fails:
the worker starts all the same, with its output on the console and one warning for the group. It
knows nothing of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastane.core.model import Fence
from elastane.runtime.offload import Offload
from elastane.runtime.streams.bounds import FINISH_S, OPEN_S
from elastane.runtime.streams.console import process_console
from elastane.runtime.streams.files import (
    ensure_base_dir,
    fresh_error_file,
    make_rank_dir,
    open_append,
)
from elastane.runtime.streams.plan import LogPlan, Std, WorkerPlace
from elastane.runtime.streams.tailer import Tail, Tailer

_log = logging.getLogger("elastane.streams")
_FILE_NAMES = {Std.OUT: "stdout.log", Std.ERR: "stderr.log"}
_CONSOLE_FDS = {Std.OUT: 1, Std.ERR: 2}


@dataclass(frozen=True, slots=True)
class WorkerStreams:
    """What one worker is started with; a path is empty where there is no file.

    The descriptors stay the group's: the worker gets duplicates of them.
    """

    stdout: int
    stderr: int
    stdout_path: str = ""
    stderr_path: str = ""
    error_file: str = ""


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
        self._offload = offload or Offload()
        self._tailer = Tailer(f"streams-{fence.round}.{fence.attempt}")

    async def open_soon(self, local_rank: int, rank: int, role: str) -> WorkerStreams:
        """Open the streams of one worker, off the event loop and within `OPEN_S`.

        A log folder that hangs costs this group its files, once, and the console takes over.
        """
        if not self._gave_up:
            try:
                opening = partial(self.open, local_rank, rank, role)
                return await self._offload.run(opening, OPEN_S)
            except TimeoutError:
                self._gave_up = True
                self._warn(Path(self._plan.base_dir), OSError(f"no answer within {OPEN_S:g} s"))
        return self.open(local_rank, rank, role)

    def open(self, local_rank: int, rank: int, role: str) -> WorkerStreams:
        """Open the streams of one worker, before it starts; may block on the log folder."""
        place = WorkerPlace(self._fence, local_rank, rank, role, self._node)
        folder = self._make_folder(place)
        stdout, stdout_path = self._open_stream(place, Std.OUT, folder)
        stderr, stderr_path = self._open_stream(place, Std.ERR, folder)
        error_file = fresh_error_file(folder) if folder else ""
        return WorkerStreams(stdout, stderr, stdout_path, stderr_path, error_file)

    def close_worker_ends(self) -> None:
        """Close the descriptors that `open` made; to be called once the workers have theirs."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()

    async def finish(self) -> None:
        """Show what the workers wrote last, once they are gone; takes `FINISH_S` at most.

        May be called again, and without any worker having started.
        """
        self.close_worker_ends()
        if not self._tailer.is_running:
            return
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell_done() -> None:
            # The loop may have ended meanwhile; then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        self._tailer.stop(tell_done)
        # A file system that hangs holds up its own thread, and not the agent.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S * 2):
                await done.wait()
        self._tailer = Tailer("streams-ended")

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
        return folder

    def _open_stream(self, place: WorkerPlace, std: Std, folder: Path | None) -> tuple[int, str]:
        """Return the descriptor for a stream, and its file's path if it has one."""
        if self._plan.keeps(place.local_rank, std) and folder is not None:
            path = folder / _FILE_NAMES[std]
            try:
                return self._open_file(place, std, path), str(path)
            except OSError as error:
                self._warn(path, error)
        if self._plan.shows(place.local_rank):
            return _CONSOLE_FDS[std], ""
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._ends.append(fd)
        return fd, ""

    def _open_file(self, place: WorkerPlace, std: Std, path: Path) -> int:
        fd = open_append(path)
        if self._gave_up:
            os.close(fd)
            raise TimeoutError("opened too late")
        self._ends.append(fd)
        teed = self._plan.tees(place.local_rank, std)
        console = process_console(_CONSOLE_FDS[std]) if teed else None
        tail = Tail(path, console, self._plan.line_prefix(place))
        tail.open()
        self._tailer.add(tail)
        return fd

    def _warn(self, path: Path, error: OSError) -> None:
        """Say once for the group that files fail; the causes of the others are the same."""
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "node %s, %s: no log files: %s: %s; output goes to the console instead. "
            "Next: free space there, or give another --log-dir [log-dir]",
            self._node,
            self._fence,
            path,
            error.strerror or error,
        )
