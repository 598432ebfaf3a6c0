"""The process that serves one attempt's process-group store, on the node that has node rank 0.

Owns its start, its successor where it ends, and its end. Where it cannot be started, that is a
failure of the group, told as one of local rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from elastane.agent.group_setup import SpawnTask
from elastane.agent.offers import OfferedPort
from elastane.errors import ElastaneError
from elastane.process.process import Spawner, WorkerProcess
from elastane.protocol.diagnosis import exit_text

_log = logging.getLogger("elastane.workers")
# Between two store processes, so that one that cannot live costs little.
_PAUSE_S = 0.2


class GroupStore:
    """Serves until `end`; `failed` hears why there is none."""

    def __init__(self, spawner: Spawner, port: OfferedPort, failed: Callable[[str], None]) -> None:
        self._spawner = spawner
        self._port = port
        self._failed = failed
        self._process: WorkerProcess | None = None
        self._ending = False

    async def start(self) -> None:
        """Serve, before any worker starts."""
        self._process = await self._serve()

    async def mind(self) -> None:
        """Serve again where the store's process ended: late workers would wait for ever."""
        while self._process is not None:
            code = await self._process.wait()
            if not self._ending:
                _log.error("the process-group store ended (%s); starting another", exit_text(code))
                await asyncio.sleep(_PAUSE_S)
            if self._ending:
                return
            self._process = await self._serve()
            self._end_late()

    def end(self) -> None:
        """Start no other from now on: the group is being stopped."""
        self._ending = True

    def kill(self) -> None:
        """End the process, if there is one, and give its port back."""
        if self._process is not None:
            self._process.kill_group(signal.SIGKILL)
        if self._ending:
            self._port.close()

    def _end_late(self) -> None:
        if self._ending:
            self.kill()

    async def _serve(self) -> WorkerProcess | None:
        try:
            return await self._spawner.serve_store(self._port.socket)
        except (ElastaneError, OSError) as error:
            self._failed(f"the process-group store was not started: {error}")
            return None


class StoreHost:
    """Where the worlds of one local worker group meet, one after the other.

    The agent's side serves a store there; where it has no zygote to fork one from, it holds the
    port, which the worker of rank 0 binds by number. One move at a time: a fault in the middle of
    a recovery brings the next world before the last one's store is up.
    """

    def __init__(self, spawner: Spawner, failed: Callable[[str], None], spawn: SpawnTask) -> None:
        self._spawner, self._failed, self._spawn = spawner, failed, spawn
        self._moving = asyncio.Lock()
        self._ending = False
        self._held: OfferedPort | None = None
        self._store: GroupStore | None = None
        self._minding: asyncio.Task[None] | None = None

    async def begin(self, port: OfferedPort, *, serves: bool) -> None:
        """Let the first world meet at `port`, before its workers start."""
        async with self._moving:
            await self._begin(port, serves=serves)

    async def move(self, port: OfferedPort | None, *, serves: bool) -> None:
        """Let the next world meet at `port`, or elsewhere; where the last one met is given up."""
        async with self._moving:
            store, held, minding = self._store, self._held, self._minding
            self._store = self._held = self._minding = None
            if port is not None:
                await self._begin(port, serves=serves)
            await _give_up(store, held, minding)

    def end(self) -> None:
        """Start no other store from now on."""
        self._ending = True
        if self._store is not None:
            self._store.end()

    def kill(self) -> None:
        """End the store's process, so that whoever waits for it is free."""
        if self._store is not None:
            self._store.kill()

    async def close(self) -> None:
        """Give up where the last world met, once a move in hand has come to its end."""
        async with self._moving:
            await _give_up(self._store, self._held, self._minding)

    async def _begin(self, port: OfferedPort, *, serves: bool) -> None:
        if self._ending:
            port.close()
        elif not serves:
            self._held = port
        else:
            self._store = store = GroupStore(self._spawner, port, self._failed)
            await store.start()
            self._minding = self._spawn(store.mind())


async def _give_up(
    store: GroupStore | None, held: OfferedPort | None, minding: asyncio.Task[None] | None
) -> None:
    if store is not None:
        store.end()
        store.kill()
    if minding is not None:
        await asyncio.wait({minding})
    if held is not None:
        held.close()
