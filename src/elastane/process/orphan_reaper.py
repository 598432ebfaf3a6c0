"""The orphan reaper: a small process that kills what an agent started when the agent cannot.

It keeps two promises. However the agent ends, SIGKILL included, no process with the agent's mark
(ELASTANE_PROCESS_MARK in the environment that the process was started with) outlives it. While the
agent is blocked, no worker trains past the deadline that the agent set last. Each worker carries
the mark and its children inherit it, so a new session or parent hides no process. A process without
the mark is never touched; a child that was started with an empty environment escapes.

This file also runs as a program, so it imports nothing of elastane at its top and nothing slow.
/proc changes during a scan: unreadable entries are skipped, and the scan is repeated until it finds
nothing several times.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastane.process.process import WorkerProcess

MARK_VARIABLE = "ELASTANE_PROCESS_MARK"
# The mark of a server that the agent runs: it ends with the agent, but not at a deadline.
SERVER_MARK_VARIABLE = "ELASTANE_SERVER_MARK"
# During an exec a process shows no environment for a moment, so one empty scan proves nothing.
QUIET_SCANS = 3
SCAN_PAUSE_S = 0.03
# Only processes that the kernel cannot end (stuck in a device or on NFS) take longer.
SWEEP_TIMEOUT_S = 30.0
# An agent that ends in good order waits this long for its orphan reaper to finish.
CLOSE_TIMEOUT_S = 5.0
# protocol.limits.STANDSTILL_LOOK_S, which this program cannot import; a test compares them.
LOOK_S = 1.0
SLUG = "agent-standstill"
# The descriptor of the deadline's memory in the orphan reaper, and its size.
_DEADLINE_FD = 3
_DEADLINE_BYTES = mmap.PAGESIZE


class Deadline:
    """The time by which workers must be dead, in memory that agent and orphan reaper share.

    Nanoseconds of CLOCK_BOOTTIME, which counts while the host is suspended; 0: no deadline. A pipe
    would fill up after some hours of a blocked orphan reaper, and would then hold deadlines that
    have passed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, _DEADLINE_BYTES)).cast("Q")

    @classmethod
    def create(cls) -> Deadline:
        """Make a deadline that is not set; raises OSError."""
        fd = os.memfd_create("elastane-deadline", os.MFD_CLOEXEC)
        os.ftruncate(fd, _DEADLINE_BYTES)
        return cls(fd)

    def set(self, boot_ns: int) -> None:
        """Set the deadline; one aligned word is stored as a whole."""
        self._words[0] = boot_ns

    def left_s(self) -> float | None:
        """Return the seconds until the deadline, negative once it has passed; None: no deadline."""
        until_ns = self._words[0]
        return (until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9 if until_ns else None

    def has_passed(self) -> bool:
        """Return whether a deadline is set and has passed."""
        left_s = self.left_s()
        return left_s is not None and left_s <= 0


class OrphanReaper:
    """The agent's handle on its orphan reaper: a pipe that shows the agent's death, and a deadline.

    `path`: a file that the orphan reaper deletes when the agent has ended.
    """

    def __init__(self, mark: str, path: str = "") -> None:
        self.mark = mark
        self._path = path
        self._process: WorkerProcess | None = None
        self._write = -1
        self._deadline: Deadline | None = None

    @property
    def pid(self) -> int | None:
        """Return the orphan reaper's pid while it lives."""
        alive = self._process is not None and self._process.exit_code is None
        return self._process.pid if self._process is not None and alive else None

    async def start(self) -> None:
        """Start the orphan reaper, or another one if the last was killed; raises OSError."""
        from elastane.process.process import adopt, spawning

        self._close_pipe()
        if self._deadline is None:  # A second orphan reaper takes over the deadline of the first.
            self._deadline = Deadline.create()
        read, self._write = os.pipe()
        try:
            # -I -S: without the job's environment and site packages it takes 7 MB and 10 ms.
            argv = [sys.executable, "-I", "-S", __file__, self.mark, self._path]
            actions = [
                (os.POSIX_SPAWN_DUP2, read, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
                (os.POSIX_SPAWN_DUP2, self._deadline.fd, _DEADLINE_FD),
            ]
            with spawning():
                pid = os.posix_spawn(  # noqa: ASYNC221 - returns at once
                    sys.executable,
                    argv,
                    {},
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=(signal.SIGPIPE,),
                )
                self._process = adopt(pid)
        finally:
            os.close(read)

    def allow_until(self, boot_ns: int) -> None:
        """Set the time of CLOCK_BOOTTIME at which workers are killed, unless it moves; 0: never."""
        assert self._deadline is not None, "started"
        self._deadline.set(boot_ns)

    async def wait(self) -> int:
        """Return when the orphan reaper has ended, which before `close` is a fault: restart it."""
        assert self._process is not None, "started"
        return await self._process.wait()

    async def close(self) -> None:
        """Let the orphan reaper kill the marked processes that are left; wait a bounded time."""
        import asyncio

        self._close_pipe()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            return  # it continues alone, and ends within its own bound

    def _close_pipe(self) -> None:
        if self._write >= 0:
            os.close(self._write)
            self._write = -1


def sweep(mark: str, excluded: Collection[int] = (), *, servers: bool = False) -> list[int]:
    """SIGKILL every process that carries `mark`, except this one and `excluded`; return their pids.

    `servers`: include the processes that carry it as one of the agent's servers.
    """
    assert mark, "an empty mark would match every process"
    names = (MARK_VARIABLE, SERVER_MARK_VARIABLE) if servers else (MARK_VARIABLE,)
    markers = {f"{name}={mark}".encode() for name in names}
    killed = []
    with os.scandir("/proc") as entries:
        pids = {int(entry.name) for entry in entries if entry.name.isdecimal()}
    for pid in pids - {os.getpid(), *excluded}:
        if _carries(pid, markers) and _kill(pid, markers):
            killed.append(pid)
    return killed


def _carries(pid: int, markers: Collection[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return not set(file.read().split(b"\0")).isdisjoint(markers)
    except OSError:
        return False  # the process is gone or belongs to another user


def _kill(pid: int, markers: Collection[bytes]) -> bool:
    """Kill `pid` if it still carries a marker while its pidfd is held, which pins its number."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, markers):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def sweep_all(mark: str) -> None:
    """Sweep until several scans found nothing, or until SWEEP_TIMEOUT_S."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    quiet = 0
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        quiet = 0 if sweep(mark, servers=True) else quiet + 1
        time.sleep(SCAN_PAUSE_S)


def keep_deadline(mark: str, shared: Deadline) -> None:
    """Kill the workers when the deadline has passed; return when stdin, a pipe, is closed."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while not poll.poll(_pause_s(shared) * 1000):
        killed = 0
        while shared.has_passed() and (some := sweep(mark)):
            killed += len(some)
            time.sleep(SCAN_PAUSE_S)
        if killed:
            _log(
                f"the agent (pid {os.getppid()}) stood still for too long to prove that no other"
                f" node trains in its place: its {killed} workers were killed [{SLUG}]"
            )


def _pause_s(shared: Deadline) -> float:
    """Return the time until the next look; short, because poll's timeout stops in suspension."""
    left_s = shared.left_s()
    return LOOK_S if left_s is None or left_s <= 0 else min(LOOK_S, left_s)


def _log(text: str) -> None:
    """Write a line to stderr, unless that is a full pipe with a blocked reader."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):
        os.write(2, f"elastane: {text}\n".encode())


def main(mark: str, path: str) -> None:
    """Kill workers by the deadline, and every marked process once stdin, a pipe, is closed.

    `path` is removed then.
    """
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    os.closerange(_DEADLINE_FD + 1, 1 << 20)
    os.chdir("/")
    keep_deadline(mark, Deadline(_DEADLINE_FD))
    try:
        sweep_all(mark)
    finally:
        if path:
            unlink(path)


def unlink(path: str) -> None:
    """Remove a file, which may be gone already."""
    try:
        os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
    except OSError:
        return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
