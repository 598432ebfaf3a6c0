"""TCP relays between clients and a server, whose connections can be cut, or stall.

A relay listens on loopback and forwards bytes both ways. All relays of one `Relays` run in one
thread with an event loop; the methods may be called from any other thread.

    with Relays() as relays:
        relay = relays.open(("127.0.0.1", server_port))
        relay.set(Mode.DEAF)
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from types import TracebackType
from typing import Self

_PIECE_BYTES = 1 << 16
_STOP_S = 10.0


class Mode(enum.Enum):
    """What a relay does with connections and their bytes."""

    OPEN = "open"
    CUT = "cut"  # Connections are reset, and new ones are refused.
    STALL = "stall"  # Bytes are held back, and sent on once the relay is open again.
    DEAF = "deaf"  # Requests arrive; answers are held back, as in STALL.


class Relay:
    """One port in front of one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: tuple[str, int]) -> None:
        self._loop = loop
        self._target = target
        self._mode = Mode.OPEN
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def set(self, mode: Mode) -> None:
        """Change what the relay does, from now on."""
        asyncio.run_coroutine_threadsafe(self._set(mode), self._loop).result(_STOP_S)

    async def start(self) -> None:
        """Listen, on the same port each time."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse new connections, and reset those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.CUT:
            await self.stop()
        elif self._server is None:
            await self.start()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            with contextlib.suppress(OSError):
                source, other = await asyncio.open_connection(*self._target)
                self._writers.add(other)
                requests = asyncio.ensure_future(self._forward(reader, other, (Mode.STALL,)))
                answers = self._forward(source, writer, (Mode.STALL, Mode.DEAF))
                await asyncio.gather(requests, answers)
        finally:
            for each in filter(None, (writer, other)):
                self._writers.discard(each)
                each.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: tuple[Mode, ...]
    ) -> None:
        """Send on what is read; where one side closes, both sides are closed."""
        while piece := await reader.read(_PIECE_BYTES):
            while self._mode in held:
                await self._changed.wait()
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError("one side closed")


class Relays:
    """A thread in which relays run."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._relays: list[Relay] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    def open(self, target: tuple[str, int]) -> Relay:
        """Return a relay in front of a server, which need not run yet."""
        relay = Relay(self._loop, target)
        asyncio.run_coroutine_threadsafe(relay.start(), self._loop).result(_STOP_S)
        self._relays.append(relay)
        return relay

    async def _end(self) -> None:
        for relay in self._relays:
            await relay.stop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
