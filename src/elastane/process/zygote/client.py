"""The agent's side of the zygote: `ZygoteSpawner`.

This module owns the zygote process, its channel, and the open requests. No worker depends on the
zygote's life: a killed, hung or unfit zygote is replaced a bounded number of times in the
background, and workers are started by exec meanwhile. Each such fallback is reported with its
reason. A worker is started exactly once: a request is given up only after the channel was shut, and
a late fork finds it shut and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elastane.errors import ElastaneError
from elastane.process.execspawn import ExecSpawner, launch
from elastane.process.process import WorkerCommand, WorkerProcess, adopt, spawning
from elastane.process.zygote import DEFAULT_PRELOAD, fitness, protocol
from elastane.process.zygote.store import send_listener

# A fork takes milliseconds, or tens of them with many gigabytes preloaded.
SPAWN_TIMEOUT_S = 5.0
# Imports take seconds, from a cold network file system a minute; an exec would take as long.
WARM_TIMEOUT_S = 120.0
# The number of deaths in a row, without a forked worker between, that ends the restarts.
DEATHS_MAX = 3
RESTART_DELAY_S = 0.2
# Room for the command line of a worker, which replaces the zygote's own.
COMMAND_LINE_BYTES = 2048
# Each try may find packages that must not be imported early; the next one omits them.
LEARN_TRIES = 4
# While the serving zygote has open requests, the new one waits; a fork takes milliseconds.
SWAP_POLL_S = 0.05
# The next process for a store is forked once the workers of a world are probably at work. A fork
# takes 20 to 50 ms on two cores (2026-11-30), which a recovery would wait for.
SPARE_STORE_AFTER_S = 0.5

Report = Callable[[str, str], None]


class _StoreProcess(NamedTuple):
    """A process that waits for the socket of the process-group store that it is to serve."""

    process: WorkerProcess
    channel: socket.socket

    def serve(self, listener: socket.socket) -> bool:
        """Let it serve on `listener`; return whether it still lives."""
        with self.channel:
            try:
                send_listener(self.channel, listener)
            except OSError:
                return False
        return True


class ZygoteSpawner:
    """Starts workers as forks of a process that has imported torch; by exec if that is impossible.

    `report(kind, reason)` is called with "warm", "problem" (a preload that failed), "died" and
    "fallback" (a worker by exec that should have been a fork).
    """

    def __init__(
        self,
        preload: Sequence[str],
        env: Mapping[str, str],
        python: str,
        report: Report = lambda kind, reason: None,
    ) -> None:
        self.warm = asyncio.Event()
        self.died = asyncio.Event()
        self.why_cold = "the zygote was not started"
        self._preload, self._env, self._python, self._report = (
            tuple(preload),
            dict(env),
            python,
            report,
        )
        self._cwd = ""
        self._exec = ExecSpawner(python)
        self._zygote: WorkerProcess | None = None
        self._sock: socket.socket | None = None
        self._requests: dict[int, asyncio.Future[WorkerProcess | str]] = {}
        self._last_id = 0
        self._deaths = 0
        self._has_torch = False
        self._runner: asyncio.Task[None] | None = None
        self._learner: asyncio.Task[None] | None = None
        # A process for the next store, and the task that forks it.
        self._spare_store: _StoreProcess | None = None
        self._store_forker: asyncio.Task[None] | None = None
        self._first_warm_up: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the zygote's pid while one lives."""
        alive = self._zygote is not None and self._zygote.exit_code is None
        return self._zygote.pid if self._zygote is not None and alive else None

    async def start(self) -> None:
        """Start the zygote; it warms up in the background."""
        self._cwd = str(Path.cwd())
        self._first_warm_up = asyncio.get_running_loop().create_future()
        self.why_cold = "the zygote is still importing"
        self._runner = asyncio.create_task(self._run_zygotes())

    async def spawn(self, command: WorkerCommand) -> WorkerProcess:
        """Start a worker; raises ConfigurationError if the command cannot be run.

        Waits for the first zygote while it imports, because an exec would import the same.
        """
        if command.kind == "exec":
            return await self._exec.spawn(command)
        reason = fitness.unfit_environment(self._env, command.env)
        reason = reason or fitness.unfit_folder(self._env, self._cwd, command)
        reason = reason or fitness.unfit_binding(command)
        if not reason:
            result = await self._fork(command)
            if isinstance(result, WorkerProcess):
                return result
            reason = result
        self._report("fallback", reason)
        return await self._exec.spawn(command)

    async def serve_store(self, listener: socket.socket) -> WorkerProcess | None:
        """Start a process that serves the process-group store on `listener`.

        Returns None if torch cannot be imported. Without a spare process and a warm zygote the
        process is an exec, which imports torch first; clients wait in the listener's backlog.
        """
        await self._wait_for_first_warm_up()
        if not self._has_torch:
            return None
        store, self._spare_store = self._spare_store, None
        if store is None or not store.serve(listener):
            store = await self._start_store()
            store.serve(listener)  # If it has ended by now, its end shows so.
        if self._store_forker is None or self._store_forker.done():
            self._store_forker = asyncio.create_task(self._fork_spare_store())
        return store.process

    async def _start_store(self) -> _StoreProcess:
        mine, its = socket.socketpair()
        try:
            with its:
                process = await self._ask({"op": "store"}, [its.fileno()])
                if isinstance(process, str):
                    self._report("fallback", process)
                    where = str(protocol.ZYGOTE_FD)
                    argv = [self._python, "-m", "elastane.process.zygote.store", where]
                    fds = {0: 0, 1: 2, 2: 2, protocol.ZYGOTE_FD: its.fileno()}
                    process = await launch(argv, self._env, self._cwd, fds)
        except BaseException:
            mine.close()
            raise
        return _StoreProcess(process, mine)

    async def _fork_spare_store(self) -> None:
        """Fork the process for the next store; without a warm zygote it is started when needed."""
        await asyncio.sleep(SPARE_STORE_AFTER_S)
        # If it cannot be started, the next store starts its own, and an error shows then.
        with contextlib.suppress(ElastaneError, OSError):
            if self.warm.is_set() and self._spare_store is None:
                self._spare_store = await self._start_store()

    def learn(self, modules: tuple[str, ...]) -> None:
        """Fork a zygote that imports `modules` too, and let it replace this one; once.

        Does nothing if the user chose what is preloaded.
        """
        chosen = self._preload != DEFAULT_PRELOAD
        if chosen or self._learner is not None or not modules or not self.warm.is_set():
            return
        self._learner = asyncio.create_task(self._replace(modules))

    async def close(self) -> None:
        """End the zygote and wait for it; workers live on."""
        self.why_cold = "the zygote was closed"
        owned = (self._runner, self._learner, self._store_forker)
        tasks = [task for task in owned if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._give_up("the zygote was closed")
        if self._spare_store is not None:
            self._spare_store.channel.close()
            self._spare_store.process.kill_group(signal.SIGKILL)
            await self._spare_store.process.wait()
            self._spare_store = None
        if self._zygote is not None:
            await self._zygote.wait()

    async def _run_zygotes(self) -> None:
        """Run one zygote after the other, until DEATHS_MAX died in a row."""
        while self._deaths < DEATHS_MAX:
            try:
                zygote = await self._launch()
            except ElastaneError as error:
                ended = str(error)
            else:
                ended = f"exit code {await self._last_code(zygote)}"
            self._deaths += 1
            self._give_up(f"the zygote died ({ended})")
            self.died.set()
            self._report("died", self.why_cold)
            await asyncio.sleep(RESTART_DELAY_S * self._deaths)
        self.why_cold = f"{DEATHS_MAX} zygotes died in a row, the last one: {self.why_cold}"

    async def _last_code(self, zygote: WorkerProcess) -> int:
        """Wait for the end of the zygote, or of the last one that replaced it."""
        while True:
            code = await zygote.wait()
            if self._zygote is zygote or self._zygote is None:
                return code
            zygote = self._zygote

    async def _replace(self, modules: Sequence[str]) -> None:
        """Fork a second zygote, have it import these modules, and swap it for the serving one."""
        unsafe: set[str] = set()
        for _ in range(LEARN_TRIES):
            names = [name for name in modules if unsafe.isdisjoint((name, name.partition(".")[0]))]
            started = await self._fork_zygote(names)
            if started is None:
                return
            zygote, sock = started
            try:
                answer = await _first_answer(sock)
                found = set(answer["unsafe"]) if answer is not None else set()
                if answer is None or (answer["unfit"] and not found):
                    return
                if not found:
                    if await self._swap(zygote, sock):
                        self._report(
                            "warm", f"with what workers import, in {answer['took_s']:.2f} s"
                        )
                    return
                unsafe |= found
            finally:
                if zygote is not self._zygote:
                    sock.close()
                    zygote.kill_group(signal.SIGKILL)
                    await zygote.wait()

    async def _fork_zygote(
        self, modules: Sequence[str]
    ) -> tuple[WorkerProcess, socket.socket] | None:
        """Fork a zygote from the serving one; return it with its channel, None if that failed."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        names = protocol.pack_names(modules)
        forked: WorkerProcess | str = ""
        try:
            forked = await self._ask({"op": "zygote"}, [names, its.fileno()])
        finally:
            os.close(names)
            its.close()
            if not isinstance(forked, WorkerProcess):
                mine.close()
        return (forked, mine) if isinstance(forked, WorkerProcess) else None

    async def _swap(self, zygote: WorkerProcess, sock: socket.socket) -> bool:
        """Let `zygote` serve from now on; the previous one ends, because its channel is closed.

        Returns False if the previous one died meanwhile, since `_run_zygotes` then starts another.
        """
        while self._requests:  # noqa: ASYNC110 - a fork in flight is answered within its bound
            await asyncio.sleep(SWAP_POLL_S)
        before = self._sock
        if before is None or not self.warm.is_set():
            return False
        self._sock, self._zygote = sock, zygote
        loop = asyncio.get_running_loop()
        loop.remove_reader(before)
        before.close()
        loop.add_reader(sock, self._read)
        return True

    async def _launch(self) -> WorkerProcess:
        self._zygote, self._sock = await self._start()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._read)
        loop.call_later(WARM_TIMEOUT_S, self._check_warm, self._zygote)
        return self._zygote

    async def _start(self) -> tuple[WorkerProcess, socket.socket]:
        """Start a zygote that imports the preload; return it with its channel."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            # Its workers' streams are like its own: unbuffered, as an exec'd worker's are.
            argv = [self._python, "-u", "-m", "elastane.process.zygote", str(os.getpid())]
            argv += [",".join(self._preload), " " * COMMAND_LINE_BYTES]
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                fds = {0: null, 1: 2, 2: 2, protocol.ZYGOTE_FD: its.fileno()}
                zygote = await launch(argv, self._env, self._cwd, fds)
            except BaseException:
                mine.close()
                raise
            finally:
                os.close(null)
        mine.setblocking(False)
        return zygote, mine

    def _check_warm(self, zygote: WorkerProcess) -> None:
        if zygote is self._zygote and not self.warm.is_set() and zygote.exit_code is None:
            zygote.kill_group(signal.SIGKILL)

    async def _wait_for_first_warm_up(self) -> None:
        if self._first_warm_up is not None:
            await asyncio.shield(self._first_warm_up)

    async def _fork(self, command: WorkerCommand) -> WorkerProcess | str:
        await self._wait_for_first_warm_up()
        try:
            payload = protocol.pack_command(command)
        except ValueError as error:
            return str(error)
        try:
            wanted = command.descriptors()
            message = {"op": "spawn", "numbers": list(wanted)}
            return await self._ask(message, [payload, *wanted.values()])
        finally:
            os.close(payload)

    async def _ask(self, message: protocol.Message, fds: list[int]) -> WorkerProcess | str:
        """Return the process that the zygote forked, or the reason that there will be none."""
        if not self.warm.is_set() or self._sock is None:
            return self.why_cold
        self._last_id += 1
        answer: asyncio.Future[WorkerProcess | str] = asyncio.get_running_loop().create_future()
        self._requests[self._last_id] = answer
        with spawning():
            try:
                protocol.send(self._sock, {**message, "id": self._last_id}, fds)
                await asyncio.wait({answer}, timeout=SPAWN_TIMEOUT_S)
            except OSError as error:
                self._give_up(f"the zygote takes no request ({error})")
            except asyncio.CancelledError:
                answer.cancel()  # no caller would hold the worker: it is killed when it arrives
                raise
            if not answer.done():
                self._give_up(f"the zygote hung: no worker within {SPAWN_TIMEOUT_S:g} s")
        result = answer.result()
        if isinstance(result, WorkerProcess):
            self._deaths = 0
        return result

    def _read(self) -> None:
        """Process every message that has arrived."""
        while self._sock is not None:
            try:
                received = protocol.receive(self._sock)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                asyncio.get_running_loop().remove_reader(self._sock)
                return
            self._on_message(*received)

    def _on_message(self, message: protocol.Message, fds: list[int]) -> None:
        if message["op"] == "warm":
            self._on_warm(message)
            return
        process = adopt(message["pid"], fds[0]) if fds else None
        answer = self._requests.pop(message["id"])
        if message["op"] == "started" and process is not None and not answer.cancelled():
            answer.set_result(process)
            return
        if process is not None:
            process.kill_group(signal.SIGKILL)  # unfit, or its caller was cancelled
        if not answer.cancelled():
            answer.set_result(str(message["reason"]))

    def _on_warm(self, message: protocol.Message) -> None:
        self._has_torch = bool(message["torch"])
        for problem in message["problems"]:
            self._report("problem", str(problem))
        if message["unfit"]:
            self.why_cold = str(message["unfit"])
            self._report("problem", self.why_cold)
        else:
            self.warm.set()
            self._report("warm", f"imported in {message['took_s']:.2f} s")
        self._end_first_warm_up()

    def _end_first_warm_up(self) -> None:
        if self._first_warm_up is not None and not self._first_warm_up.done():
            self._first_warm_up.set_result(None)

    def _give_up(self, reason: str) -> None:
        """Shut the channel, accept the answers that arrived, and fail the other requests.

        After the shutdown no fork can report as started, and those that did are in the queue. So a
        request that fails here never runs.
        """
        self.warm.clear()
        if self.pid is not None or self._sock is not None:
            self.why_cold = reason
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)
            self._read()
            self._sock.close()
            self._sock = None
        if self._zygote is not None:
            self._zygote.kill_group(signal.SIGKILL)
        for answer in self._requests.values():
            if not answer.done():
                answer.set_result(reason)
        self._requests.clear()
        self._end_first_warm_up()


async def _first_answer(sock: socket.socket) -> protocol.Message | None:
    """Return the first message of a zygote; None if it ends before, or takes too long."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def report() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, report)
    try:
        async with asyncio.timeout(WARM_TIMEOUT_S):
            await readable
        received = protocol.receive(sock)
    except (TimeoutError, OSError):
        return None
    finally:
        loop.remove_reader(sock)
    return received[0] if received is not None else None
