"""The warden: a tiny process that kills what an agent started when the agent cannot.

Owns two promises. However the agent ends, SIGKILL included, no process that carries its leash
(ELASTANE_LEASH in the environment that the process was started with) outlives it. And while the
agent stands still, no worker trains past the deadline that the agent set last. Each worker
carries the leash, its children inherit it, and it is found whatever session or parent they took
since; a process without it is never touched. Children that were given an empty environment
escape. This file runs as a program too, on its own, so it imports nothing of elastane at its top
and nothing slow. /proc that changes underfoot is the normal case: what cannot be read is passed
over, and the search is repeated until it finds nothing several times.
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

LEASH_VARIABLE = "ELASTANE_LEASH"
# The leash of a server that the agent keeps: it ends with the agent, and outlives a deadline.
SERVER_LEASH_VARIABLE = "ELASTANE_SERVER_LEASH"
# A process in the middle of an exec shows no environment for a moment: look again.
QUIET_SCANS = 3
SCAN_PAUSE_S = 0.03
# Only processes that the kernel cannot end (stuck in a device or on NFS) take longer.
SWEEP_TIMEOUT_S = 30.0
# The agent waits this long for its warden to finish when it ends in good order.
CLOSE_TIMEOUT_S = 5.0
# core.limits.STANDSTILL_LOOK_S, which this program cannot import; a test compares them.
LOOK_S = 1.0
SLUG = "agent-standstill"
# Where the warden finds the deadline's memory, and its size.
_DEADLINE_FD = 3
_DEADLINE_BYTES = mmap.PAGESIZE


class Deadline:
    """When workers have to be dead at the latest, in memory that agent and warden share.

    Nanoseconds of CLOCK_BOOTTIME, which counts while the host is suspended; 0: no deadline.
    A pipe would be full after some hours of a warden that stands still, and would then hold
    deadlines that have passed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, _DEADLINE_BYTES)).cast("Q")

    @classmethod
    def create(cls) -> Deadline:
        """Make one, without a deadline; raises OSError."""
        fd = os.memfd_create("elastane-deadline", os.MFD_CLOEXEC)
        os.ftruncate(fd, _DEADLINE_BYTES)
        return cls(fd)

    def set(self, boot_ns: int) -> None:
        """Set it: one aligned word, which is stored whole."""
        self._words[0] = boot_ns

    def left_s(self) -> float | None:
        """Return how many seconds are left, less than 0 once it has passed; None: no deadline."""
        until_ns = self._words[0]
        return (until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9 if until_ns else None

    def has_passed(self) -> bool:
        """Whether there is a deadline, and it has passed."""
        left_s = self.left_s()
        return left_s is not None and left_s <= 0


class Warden:
    """The agent's hold on its warden: a pipe that shows the agent's death, and a deadline.

    `path` is a file that goes with the agent.
    """

    def __init__(self, leash: str, path: str = "") -> None:
        self.leash = leash
        self._path = path
        self._process: WorkerProcess | None = None
        self._write = -1
        self._deadline: Deadline | None = None

    @property
    def pid(self) -> int | None:
        """Return the warden's pid while it lives."""
        alive = self._process is not None and self._process.exit_code is None
        return self._process.pid if self._process is not None and alive else None

    async def start(self) -> None:
        """Start the warden, or another one where the last was killed; raises OSError."""
        from elastane.process.process import adopt, spawning

        self._close_pipe()
        if self._deadline is None:  # Another warden keeps the deadline of the last one.
            self._deadline = Deadline.create()
        read, self._write = os.pipe()
        try:
            # -I -S: neither the job's environment nor site packages; 7 MB, 10 ms.
            argv = [sys.executable, "-I", "-S", __file__, self.leash, self._path]
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
        """Have workers killed at that time of CLOCK_BOOTTIME, unless it is moved on; 0: never."""
        assert self._deadline is not None, "started"
        self._deadline.set(boot_ns)

    async def wait(self) -> int:
        """Return when the warden has ended, which before `close` is a fault: start it again."""
        assert self._process is not None, "started"
        return await self._process.wait()

    async def close(self) -> None:
        """Let the warden end what is left of the leash, and wait for it, a bounded time."""
        import asyncio

        self._close_pipe()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            return  # it goes on by itself, and ends within its own bound

    def _close_pipe(self) -> None:
        if self._write >= 0:
            os.close(self._write)
            self._write = -1


def sweep(leash: str, spare: Collection[int] = (), *, servers: bool = False) -> list[int]:
    """SIGKILL every process that carries `leash`, but this one and `spare`; returns their pids.

    `servers`: those as well that carry it as one of the agent's servers.
    """
    assert leash, "an empty leash would be everybody's"
    names = (LEASH_VARIABLE, SERVER_LEASH_VARIABLE) if servers else (LEASH_VARIABLE,)
    markers = {f"{name}={leash}".encode() for name in names}
    killed = []
    with os.scandir("/proc") as entries:
        pids = {int(entry.name) for entry in entries if entry.name.isdecimal()}
    for pid in pids - {os.getpid(), *spare}:
        if _carries(pid, markers) and _kill(pid, markers):
            killed.append(pid)
    return killed


def _carries(pid: int, markers: Collection[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return not set(file.read().split(b"\0")).isdisjoint(markers)
    except OSError:
        return False  # gone, or another user's


def _kill(pid: int, markers: Collection[bytes]) -> bool:
    """Kill `pid` if it still carries a marker now that its number cannot change hands."""
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


def sweep_all(leash: str) -> None:
    """Sweep until nothing was left for several scans, or the time is up."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    quiet = 0
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        quiet = 0 if sweep(leash, servers=True) else quiet + 1
        time.sleep(SCAN_PAUSE_S)


def keep_deadline(leash: str, shared: Deadline) -> None:
    """Kill the workers whenever the deadline has passed, until stdin, a pipe, ends."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while not poll.poll(_pause_s(shared) * 1000):
        killed = 0
        while shared.has_passed() and (some := sweep(leash)):
            killed += len(some)
            time.sleep(SCAN_PAUSE_S)
        if killed:
            _say(
                f"the agent (pid {os.getppid()}) stood still for too long to prove that no other"
                f" node trains in its place: its {killed} workers were killed [{SLUG}]"
            )


def _pause_s(shared: Deadline) -> float:
    """Return how long to wait; short, since the timer stands still while the host is suspended."""
    left_s = shared.left_s()
    return LOOK_S if left_s is None or left_s <= 0 else min(LOOK_S, left_s)


def _say(text: str) -> None:
    """Write a line to stderr, which may be a full pipe whose reader stands still as well."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):
        os.write(2, f"elastane: {text}\n".encode())


def main(leash: str, path: str) -> None:
    """Kill what has to end by the deadline, and all at the end of the pipe that is stdin.

    `path` is removed then.
    """
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    os.closerange(_DEADLINE_FD + 1, 1 << 20)
    os.chdir("/")
    keep_deadline(leash, Deadline(_DEADLINE_FD))
    try:
        sweep_all(leash)
    finally:
        if path:
            unlink(path)


def unlink(path: str) -> None:
    """Remove a file; that it is gone already is the normal case."""
    try:
        os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
    except OSError:
        return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
