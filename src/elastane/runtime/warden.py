"""The warden: a tiny process that ends everything of an agent's when the agent is gone.

Owns one promise: however the agent ends, SIGKILL included, no process that carries its leash
(ELASTANE_LEASH in the environment that the process was started with) outlives it. Each worker
carries the leash, its children inherit it, and it is found whatever session or parent they took
since; a process without it is never touched. Children that were given an empty environment
escape. This file runs as a program too, on its own, so it imports nothing of elastane at its top
and nothing slow. /proc that changes underfoot is the normal case: what cannot be read is passed
over, and the search is repeated until it finds nothing several times.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastane.runtime.process import WorkerProcess

LEASH_VARIABLE = "ELASTANE_LEASH"
# A process in the middle of an exec shows no environment for a moment: look again.
QUIET_SCANS = 3
SCAN_PAUSE_S = 0.03
# Only processes that the kernel cannot end (stuck in a device or on NFS) take longer.
SWEEP_TIMEOUT_S = 30.0
# The agent waits this long for its warden to finish when it ends in good order.
CLOSE_TIMEOUT_S = 5.0


class Warden:
    """The agent's hold on its warden: a pipe whose other end notices the agent's death.

    `path` is a file that goes with the agent.
    """

    def __init__(self, leash: str, path: str = "") -> None:
        self.leash = leash
        self._path = path
        self._process: WorkerProcess | None = None
        self._write = -1

    @property
    def pid(self) -> int | None:
        """Return the warden's pid while it lives."""
        alive = self._process is not None and self._process.exit_code is None
        return self._process.pid if self._process is not None and alive else None

    async def start(self) -> None:
        """Start the warden, or another one where the last was killed; raises OSError."""
        from elastane.runtime.process import adopt, spawning

        self._close_pipe()
        read, self._write = os.pipe()
        try:
            # -I -S: neither the job's environment nor site packages; 7 MB, 10 ms.
            argv = [sys.executable, "-I", "-S", __file__, self.leash, self._path]
            actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
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


def sweep(leash: str, spare: Collection[int] = ()) -> list[int]:
    """SIGKILL every process that carries `leash`, but this one and `spare`; returns their pids."""
    assert leash, "an empty leash would be everybody's"
    marker = f"{LEASH_VARIABLE}={leash}".encode()
    killed = []
    with os.scandir("/proc") as entries:
        pids = {int(entry.name) for entry in entries if entry.name.isdecimal()}
    for pid in pids - {os.getpid(), *spare}:
        if _carries(pid, marker) and _kill(pid, marker):
            killed.append(pid)
    return killed


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return marker in file.read().split(b"\0")
    except OSError:
        return False  # gone, or another user's


def _kill(pid: int, marker: bytes) -> bool:
    """Kill `pid` if it still carries the marker now that its number cannot change hands."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, marker):
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
        quiet = 0 if sweep(leash) else quiet + 1
        time.sleep(SCAN_PAUSE_S)


def main(leash: str, path: str) -> None:
    """Wait for the end of the pipe that is this program's stdin, then sweep, and remove `path`."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    os.closerange(3, 1 << 20)
    os.chdir("/")
    while os.read(0, 1):
        pass
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
