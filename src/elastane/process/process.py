"""A worker's process: how it is described, waited for, signalled and reaped.

Owns the pidfds of all children of the agent and the reaping of orphans that the agent, as
subreaper, adopts. There is no SIGCHLD handler and no wait by pid for a process that is not ours,
so a signal never hits a stranger that got the same number. Knows nothing of how processes are
made (execspawn, zygote) nor of ranks. A process that is gone is no error for any signal.

Contract: whatever the agent starts, it starts through a Spawner or `adopt`s; any other child
would be taken for an orphan and reaped.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

WorkerKind = Literal["script", "module", "exec", "run-path"]
# The exit code of a worker whose status somebody else took.
EXIT_UNKNOWN = 255

_ours: set[int] = set()
_spawns_in_flight = 0


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What a worker is to run, with everything it inherits.

    `kind`: script is a Python file, module is `python -m`, exec any program, run-path what
    `runpy.run_path` takes. `env` is the whole environment. `stdin`, `stdout`, `stderr` are
    descriptors of this process; `fds` maps a number in the worker to a descriptor here. `cpus` are
    those that it may run on; none where it is not bound.
    """

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: int
    stdout: int
    stderr: int
    fds: Mapping[int, int]
    cpus: frozenset[int] = frozenset()

    def descriptors(self) -> dict[int, int]:
        """Return number in the worker -> descriptor here, the standard three among them."""
        return {**self.fds, 0: self.stdin, 1: self.stdout, 2: self.stderr}


class WorkerProcess:
    """One child of this process, leader of its own session, held by a pidfd."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        # The most memory that it held, once it has ended; 0: unknown.
        self.peak_bytes = 0
        self._pidfd = pidfd
        self._group_is_gone = False
        self._ended: asyncio.Future[int] | None = None

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_reader(self._pidfd, self._on_exit, loop)

    def _on_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            # By the pidfd, that it is over; then by the pid, which nobody else has until this wait.
            if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:
            self.exit_code = EXIT_UNKNOWN
        else:
            self.exit_code = os.waitstatus_to_exitcode(status)
            self.peak_bytes = usage.ru_maxrss * 1024
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _ours.discard(self.pid)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self.exit_code)
        reap_orphans()

    async def wait(self) -> int:
        """Return the exit code once the process has ended; negative is a signal."""
        assert self._ended is not None, "made by adopt()"
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        """Send to the process alone."""
        if self.exit_code is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            return  # it ended; _on_exit follows

    def abort(self) -> None:
        """Have it end by SIGABRT, whose handlers show its stacks; also where it is stopped.

        No core is dumped: what hangs may hold a machine's memory, and would be an hour in writing.
        """
        with suppress(OSError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, 0))
        self.send_signal(signal.SIGABRT)
        self.send_signal(signal.SIGCONT)

    def kill_group(self, signum: int) -> None:
        """Send to every process of its group that is left."""
        self._signal_group(signum)

    def group_is_alive(self) -> bool:
        """Whether any process of its group is left; orphans that ended are reaped first."""
        reap_orphans()
        return self._signal_group(0)

    def _signal_group(self, signum: int) -> bool:
        # While a group exists its number is given to no new process. So once the leader is
        # reaped, a process of that number is a stranger, and the group is gone.
        if self.exit_code is not None and Path(f"/proc/{self.pid}").exists():
            self._group_is_gone = True
        if self._group_is_gone:
            return False
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            self._group_is_gone = self.exit_code is not None
            return False
        except PermissionError:
            return True  # a setuid program among them: alive, and not ours to signal
        return True

    def catches(self, signum: int) -> bool:
        """Whether the process has a handler for `signum`."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        for line in status.splitlines():
            if line.startswith("SigCgt:") and self.exit_code is None:
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
        return False


class Spawner(Protocol):
    """What starts workers. `warm` is set while `spawn` would be quick."""

    warm: asyncio.Event

    async def start(self) -> None:
        """Get ready; returns at once where getting ready goes on in the background."""

    async def spawn(self, command: WorkerCommand) -> WorkerProcess:
        """Start a worker; raises ConfigurationError where the command cannot be run."""

    def learn(self, modules: tuple[str, ...]) -> None:
        """Have later workers find these modules imported; returns at once, and may do nothing."""

    async def serve_store(self, listener: socket.socket) -> WorkerProcess | None:
        """Start a process that serves the process-group store, or None where none can be."""

    async def close(self) -> None:
        """End what the spawner itself runs; workers live on."""


def adopt(pid: int, pidfd: int | None = None) -> WorkerProcess:
    """Take charge of a child of this process that nobody has waited for."""
    process = WorkerProcess(pid, os.pidfd_open(pid) if pidfd is None else pidfd)
    _ours.add(pid)
    process._watch()
    return process


def is_ours(pid: int) -> bool:
    """Whether `pid` is, or while one is being spawned may be, a child that was started here."""
    return pid in _ours or _spawns_in_flight > 0


@contextmanager
def spawning() -> Iterator[None]:
    """Hold orphan reaping off: a child that just arrived may not be known as ours yet."""
    global _spawns_in_flight  # noqa: PLW0603 - reaping is a matter of the whole process
    _spawns_in_flight += 1
    try:
        yield
    finally:
        _spawns_in_flight -= 1


def reap_orphans() -> list[int]:
    """Reap ended processes that this one adopted as subreaper; returns their pids."""
    reaped: list[int] = []
    while not _spawns_in_flight:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if info is None or info.si_pid in _ours:
            break  # none, or one whose own pidfd is about to be read
        os.waitid(os.P_PID, info.si_pid, os.WEXITED | os.WNOHANG)
        reaped.append(info.si_pid)
    return reaped
