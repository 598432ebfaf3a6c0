"""Workers as fresh processes: fork, then exec of a new interpreter or program.

This module owns the steps between fork and exec: session, death with the parent, signals,
descriptors and folder. It knows nothing of the zygote, which is itself started by `launch`. A
program that cannot be run raises ConfigurationError with the program and the cause; so does a file
system that hangs, after a timeout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import NoReturn

from elastane.errors import ConfigurationError
from elastane.process.kernel import (
    bind_to_cpus,
    die_with_parent,
    place_descriptors,
    restore_descriptor_limit,
)
from elastane.process.process import WorkerCommand, WorkerProcess, adopt, spawning

# Fork to exec takes a few milliseconds, unless the program's file system hangs.
EXEC_TIMEOUT_S = 30.0
ERROR_BYTES_MAX = 1024
# The code for `python -c` that runs a path as the launcher itself would (torchrun --run-path).
RUN_PATH_CODE = (
    "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def command_line(command: WorkerCommand, python: str) -> list[str]:
    """Return the argument vector that runs `command` as its own program."""
    leads = {
        # -u, as in torchrun: otherwise output into a pipe waits in the worker's memory.
        "script": [python, "-u"],
        "module": [python, "-u", "-m"],
        "exec": [],
        "run-path": [python, "-u", "-c", RUN_PATH_CODE],
    }
    return [*leads[command.kind], command.target, *command.args]


async def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    cpus: frozenset[int] = frozenset(),
) -> WorkerProcess:
    """Start a program in its own session; it dies when this process does.

    `cpus`: the CPUs that it may run on; empty for the CPUs of this process.
    """
    with spawning():
        read, write = os.pipe()
        # A signal between fork and exec would run the agent's handlers in the child.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become(argv, env, cwd, descriptors, (parent, write, cpus))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            os.close(write)
        process = adopt(pid)
    try:
        error = await _read_to_end(read)
    except TimeoutError:
        process.kill_group(signal.SIGKILL)
        error = f"no answer in {EXEC_TIMEOUT_S:g} s".encode()
    except asyncio.CancelledError:
        process.kill_group(signal.SIGKILL)  # otherwise no object would hold the process
        raise
    finally:
        os.close(read)
    if error:
        await process.wait()
        raise ConfigurationError(
            f"cannot run {argv[0]!r}: {error.decode(errors='replace')}",
            slug="worker-start",
            where=f"folder {cwd}",
            expected="a program that exists and may be executed, and a folder that exists",
            next_step=f"run it by hand: cd {cwd} && {' '.join(argv)}",
        )
    return process


async def _read_to_end(fd: int) -> bytes:
    """Return the bytes until the other end closes, which exec does."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _set_done, readable)
    try:
        # Not wait_for: in Python 3.11 it loses a cancellation that comes with the result.
        async with asyncio.timeout(EXEC_TIMEOUT_S):
            await readable
        return os.read(fd, ERROR_BYTES_MAX)
    finally:
        loop.remove_reader(fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _become(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    rest: tuple[int, int, frozenset[int]],
) -> NoReturn:
    """Turn this forked child into the program; never returns to the agent's code."""
    parent, report, cpus = rest
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        die_with_parent(parent)
        bind_to_cpus(cpus)
        report = place_descriptors(descriptors, (report,))[report]
        restore_descriptor_limit()
        _reset_signals()
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as error:
        os.write(report, _reason_of(error, argv[0]).encode(errors="replace")[:ERROR_BYTES_MAX])
    finally:
        os._exit(127)


def _reason_of(error: BaseException, program: str) -> str:
    """Return why a program could not be run; a file that is not the program is named."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    named = f"{error.filename}: " if error.filename and error.filename != program else ""
    return f"{named}{error.strerror}"


def _reset_signals() -> None:
    """Reset the handlers that Python installed; signals ignored before Python stay ignored."""
    for signum in signal.valid_signals():
        handler = signal.getsignal(signum)
        mine = handler not in (signal.SIG_DFL, signal.SIG_IGN, None)
        if mine or signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class ExecSpawner:
    """Starts each worker as its own program; `warm` is always set, because no preparation helps."""

    def __init__(self, python: str) -> None:
        self.warm = asyncio.Event()
        self._python = python

    async def start(self) -> None:
        """Set `warm`; nothing needs preparation."""
        self.warm.set()

    async def spawn(self, command: WorkerCommand) -> WorkerProcess:
        """Start a worker; raises ConfigurationError where the command cannot be run."""
        argv = command_line(command, self._python)
        return await launch(argv, command.env, command.cwd, command.descriptors(), command.cpus)

    def learn(self, modules: tuple[str, ...]) -> None:
        """Do nothing: each worker imports its own modules."""

    async def serve_store(self, listener: socket.socket) -> WorkerProcess | None:
        """Return None: without a zygote the worker of rank 0 serves the process-group store."""
        assert listener.fileno() >= 0
        return None

    async def close(self) -> None:
        """Clear `warm`; nothing else runs."""
        self.warm.clear()
