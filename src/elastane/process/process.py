"""A worker's process: how the agent describes it, waits for it, signals it and reaps it.

This module owns the pidfds of all children of the agent, and reaps the orphans that the agent
adopts as subreaper. It installs no SIGCHLD handler and waits by pid only for its own children, so a
signal never hits another process that got the same number. It does not know how processes are made
(execspawn, zygote). A signal to a process that is gone is no error.

A descendant that made its own session or forked twice becomes the agent's child once its parent is
gone. After a worker group has ended, every child that the agent did not start is such a stray. The
kernel's list of children makes this cheap: no scan of /proc.

Contract: the agent starts every child through a Spawner or passes it to `adopt`; any other child is
taken for an orphan and reaped.
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
# The exit code of a worker whose status another wait consumed.
EXIT_UNKNOWN = 255

_ours: set[int] = set()
_spawns_in_flight = 0


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The program of a worker, with everything that it inherits.

    `kind`: `script` is a Python file, `module` is `python -m`, `exec` is any program, `run-path` is
    a path for `runpy.run_path`. `env`: the whole environment. `stdin`, `stdout`, `stderr`:
    descriptors of this process. `fds`: number in the worker -> descriptor here. `cpus`: the CPUs
    that it may run on; empty: no binding.
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
        """Return number in the worker -> descriptor here, including the standard three."""
        return {**self.fds, 0: self.stdin, 1: self.stdout, 2: self.stderr}


class WorkerProcess:
    """One child of this process, the leader of its session, held by a pidfd."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        # The peak of its memory, known once it has ended; 0: unknown.
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
            # The pidfd shows that it has ended. Its pid stays reserved until the wait by pid.
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
        """Return the exit code once the process has ended; a negative one is a signal."""
        assert self._ended is not None, "made by adopt()"
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        """Send a signal to this process only."""
        if self.exit_code is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            return  # it has ended; _on_exit follows

    def abort(self) -> None:
        """End the process by SIGABRT, whose handlers print its stacks, even while it is stopped.

        No core is dumped: a hanging process may hold a machine's memory, which takes an hour to
        write.
        """
        with suppress(OSError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, 0))
        self.send_signal(signal.SIGABRT)
        self.send_signal(signal.SIGCONT)

    def kill_group(self, signum: int) -> None:
        """Send a signal to every process that is left in its group."""
        self._signal_group(signum)

    def group_is_alive(self) -> bool:
        """Return whether any process of its group is left; ended orphans are reaped first."""
        reap_orphans()
        return self._signal_group(0)

    def _signal_group(self, signum: int) -> bool:
        # While a group exists no new process gets its number. So a process with that number, after
        # the leader was reaped, is unrelated, and the group is gone.
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
            return True  # a setuid program is alive, and may not be signalled
        return True

    def catches(self, signum: int) -> bool:
        """Return whether the process has a handler for `signum`."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        for line in status.splitlines():
            if line.startswith("SigCgt:") and self.exit_code is None:
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
        return False


class Spawner(Protocol):
    """A way to start workers. `warm` is set while `spawn` is quick."""

    warm: asyncio.Event

    async def start(self) -> None:
        """Begin the preparation, which may continue in the background."""

    async def spawn(self, command: WorkerCommand) -> WorkerProcess:
        """Start a worker; raises ConfigurationError if the command cannot be run."""

    def learn(self, modules: tuple[str, ...]) -> None:
        """Import these modules for later workers, if the spawner supports it; returns at once."""

    async def serve_store(self, listener: socket.socket) -> WorkerProcess | None:
        """Start a process that serves the process-group store; None if the spawner has none."""

    async def close(self) -> None:
        """End the spawner's own processes; workers live on."""


def adopt(pid: int, pidfd: int | None = None) -> WorkerProcess:
    """Register a child of this process that was not waited for yet."""
    process = WorkerProcess(pid, os.pidfd_open(pid) if pidfd is None else pidfd)
    _ours.add(pid)
    process._watch()
    return process


def is_ours(pid: int) -> bool:
    """Return whether this process started the child `pid`; True while a spawn is in flight."""
    return pid in _ours or _spawns_in_flight > 0


@contextmanager
def spawning() -> Iterator[None]:
    """Suspend the reaping of orphans: a child that was just forked may not be registered yet."""
    global _spawns_in_flight  # noqa: PLW0603 - reaping concerns the whole process
    _spawns_in_flight += 1
    try:
        yield
    finally:
        _spawns_in_flight -= 1


def reap_orphans() -> list[int]:
    """Reap ended processes that this one adopted as subreaper; return their pids."""
    reaped: list[int] = []
    while not _spawns_in_flight:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if info is None or info.si_pid in _ours:
            break  # none, or a registered child whose pidfd is about to be read
        os.waitid(os.P_PID, info.si_pid, os.WEXITED | os.WNOHANG)
        reaped.append(info.si_pid)
    return reaped


# The children of a killed stray become strays in turn; no deeper tree than this is expected.
_ROUNDS_MAX = 50
_PAUSE_S = 0.002


def strays() -> list[int]:
    """Return the pids of children that this process did not start."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text(encoding="ascii")
        except OSError:
            continue  # a thread that ended meanwhile, or a kernel without this list
        found += [pid for pid in map(int, text.split()) if not is_ours(pid)]
    return found


async def kill_strays() -> int:
    """Kill all strays and their children in turn; return how many there were."""
    killed: set[int] = set()
    for _ in range(_ROUNDS_MAX):
        reap_orphans()
        left = strays()
        if not left:
            break
        for pid in left:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(_PAUSE_S)
    return len(killed)
