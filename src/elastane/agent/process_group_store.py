"""The process-group store of an attempt: its port, and the process that serves it there.

`OfferedPort` holds the port of the next attempt's process-group store from before it is offered.
The socket listens before its port is announced. A worker that connects before the store's process
runs therefore waits in the backlog (7 ms to a process group, measured). A refused connection costs
500 ms, for which torch's client sleeps.

Each attempt has a new port, so none can read what an earlier one wrote. torchrun 2.13's default
store survives attempts, and recovered a killed worker in 7 of 26 runs.

On the node with node rank 0, `StoreHost` owns the start of the store's process, its replacement
when it dies, and its end. If it cannot be started, that is a failure of the group, reported for
local rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

from elastane.agent.worker import SpawnTask
from elastane.errors import ElastaneError
from elastane.process.endpoint import bound
from elastane.process.process import Spawner, WorkerProcess
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.model import PortOffer

_log = logging.getLogger("elastane.workers")
# Pause between two store processes, so that one that always dies costs little.
_PAUSE_S = 0.2
# As many connections as the workers of a large job may open at once; the kernel caps it at
# somaxconn.
_BACKLOG = 4096


class OfferedPort:
    """One held port; `listening` if this agent serves the store.

    Without a zygote to serve the store, the socket is bound but does not listen. The kernel gives
    such a port to no process that asks for any port. A worker that binds it by number, with
    SO_REUSEADDR as torch does, gets it.
    """

    def __init__(
        self, *, listening: bool, host: str = "", held: socket.socket | None = None
    ) -> None:
        """`host` is where others reach this node; see `process.endpoint.bound`.

        `held`: a bound socket to own; without it, `open` binds one.
        """
        self.listening = listening
        self._host = host
        self._socket = held

    def open(self) -> PortOffer:
        """Bind a port of the kernel's choice, and release the one that is held.

        A port that does not listen is held on all addresses, since torch's store will bind all. The
        held one is released last: the kernel might choose it again, and others may know it.
        """
        opened = bound(self._host if self.listening else "", 0)
        self.close()
        self._socket = opened
        if self.listening:
            opened.listen(_BACKLOG)
        return self.offer

    @property
    def offer(self) -> PortOffer:
        """What other nodes learn about the held port."""
        return PortOffer(port=self.socket.getsockname()[1], agent_store=self.listening)

    @property
    def is_open(self) -> bool:
        """Whether a port is held."""
        return self._socket is not None

    @property
    def socket(self) -> socket.socket:
        """The bound socket."""
        assert self._socket is not None, "open() comes first"
        return self._socket

    def hand_over(self) -> OfferedPort:
        """Return a port object that owns the held socket; this one is free afterwards."""
        owner = OfferedPort(listening=self.listening, host=self._host, held=self._socket)
        self._socket = None
        return owner

    def close(self) -> None:
        """Release the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class GroupStore:
    """Serves a store until `end`; `failed` receives the reason if it cannot be started."""

    def __init__(self, spawner: Spawner, port: OfferedPort, failed: Callable[[str], None]) -> None:
        self._spawner = spawner
        self._port = port
        self._failed = failed
        self._process: WorkerProcess | None = None
        self._ending = False

    async def start(self) -> None:
        """Start serving, before any worker starts."""
        self._process = await self._serve()

    async def supervise(self) -> None:
        """Start another process when the store's ended: late workers would wait forever."""
        while self._process is not None:
            code = await self._process.wait()
            if not self._ending:
                _log.error("the process-group store ended (%s); starting another", exit_text(code))
                await asyncio.sleep(_PAUSE_S)
            if self._ending:
                return
            self._process = await self._serve()
            self._kill_if_ending()

    def end(self) -> None:
        """Start no other process: the group is being stopped."""
        self._ending = True

    def kill(self) -> None:
        """Kill the process, if there is one, and release its port."""
        if self._process is not None:
            self._process.kill_group(signal.SIGKILL)
        if self._ending:
            self._port.close()

    def _kill_if_ending(self) -> None:
        if self._ending:
            self.kill()

    async def _serve(self) -> WorkerProcess | None:
        try:
            return await self._spawner.serve_store(self._port.socket)
        except (ElastaneError, OSError) as error:
            self._failed(f"the process-group store was not started: {error}")
            return None


class StoreHost:
    """The process-group stores of the successive worlds of one local worker group.

    The agent serves a store there. Without a zygote to fork one from, it holds the port, which the
    worker of rank 0 binds by number. Moves are serialized: a fault in the middle of a recovery
    brings the next world before the store of the last one is up.
    """

    def __init__(self, spawner: Spawner, failed: Callable[[str], None], spawn: SpawnTask) -> None:
        self._spawner = spawner
        self._failed = failed
        self._spawn = spawn
        self._move_lock = asyncio.Lock()
        self._ending = False
        self._held: OfferedPort | None = None
        self._store: GroupStore | None = None
        self._supervision: asyncio.Task[None] | None = None

    async def begin(self, port: OfferedPort, *, serves: bool) -> None:
        """Let the first world meet at `port`, before its workers start."""
        async with self._move_lock:
            await self._open(port, serves=serves)

    async def move(self, port: OfferedPort | None, *, serves: bool) -> None:
        """Let the next world meet at `port`, or on another node; close the previous store."""
        async with self._move_lock:
            store, held, supervision = self._store, self._held, self._supervision
            self._store = self._held = self._supervision = None
            if port is not None:
                await self._open(port, serves=serves)
            await _close(store, held, supervision)

    def end(self) -> None:
        """Start no other store."""
        self._ending = True
        if self._store is not None:
            self._store.end()

    def kill(self) -> None:
        """Kill the store's process, which frees the workers that wait for it."""
        if self._store is not None:
            self._store.kill()

    async def close(self) -> None:
        """Close the last store, after a running move has finished."""
        async with self._move_lock:
            await _close(self._store, self._held, self._supervision)

    async def _open(self, port: OfferedPort, *, serves: bool) -> None:
        if self._ending:
            port.close()
        elif not serves:
            self._held = port
        else:
            self._store = store = GroupStore(self._spawner, port, self._failed)
            await store.start()
            self._supervision = self._spawn(store.supervise())


async def _close(
    store: GroupStore | None, held: OfferedPort | None, supervision: asyncio.Task[None] | None
) -> None:
    if store is not None:
        store.end()
        store.kill()
    if supervision is not None:
        await asyncio.wait({supervision})
    if held is not None:
        held.close()
