"""The connections of a dashboard: how many are open, and how long each may be silent.

A connection is proven once the guard has accepted a request of it. At the bound of unproven
connections the oldest is closed for a new one, so other users cannot keep the job's owner out. Any
connection is closed if it sends no whole request, or does not take what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastane.dashboard.guard import is_loopback, is_of_this_user
from elastane.process.endpoint import Unproven

# A browser opens six connections and proves each with its first request, a round trip later.
UNPROVEN_MAX = 128
# A stream of each window, and requests beside it; both bounds together leave half of the 1,024
# descriptors that a process usually has for the folders of jobs.
PROVEN_MAX = 384
# A request follows its connection within a round trip, also over a tunnel to another continent.
_UNPROVEN_MIN_S = 0.5
# A request is one piece of some hundred bytes, with its body; also the next one of a connection.
REQUEST_S = 10.0
REQUEST_BYTES_MAX = 16 << 10
# A browser that takes nothing for this long is gone or stopped; it connects again by itself.
SEND_S = 30.0
# The pause if the system has no descriptor or memory for another connection.
_EXHAUSTED_PAUSE_S = 0.5
# The key of a request's state that leads to its connection.
_KEY = "connection"


class Connections:
    """The open connections of a server, each in one of two sets with a bound."""

    def __init__(self) -> None:
        self._unproven = Unproven[Connection](UNPROVEN_MAX, _UNPROVEN_MIN_S)
        self._proven: set[Connection] = set()

    def wait_s(self, now_s: float) -> float:
        """Return how long the next connection has to wait in the kernel's queue; 0: no wait."""
        return self._unproven.wait_s(now_s)

    def add(self, connection: Connection, now_s: float) -> None:
        """Count a new connection; close the oldest unproven one if there is no room."""
        if (oldest := self._unproven.make_room()) is not None:
            oldest.abort()
        self._unproven.add(connection, now_s)

    def prove(self, connection: Connection) -> None:
        """Count the connection as proven, unless there are PROVEN_MAX: no new one replaces it."""
        if len(self._proven) < PROVEN_MAX and self._unproven.discard(connection):
            self._proven.add(connection)

    def discard(self, connection: Connection) -> None:
        """Stop counting a connection that is lost."""
        self._unproven.discard(connection)
        self._proven.discard(connection)


class Connection(H11Protocol):
    """One connection: it must ask within REQUEST_S, and take what is sent within SEND_S."""

    def __init__(
        self, config: uvicorn.Config, state: uvicorn.server.ServerState, connections: Connections
    ) -> None:
        super().__init__(config, state, {_KEY: self})
        self._counted = connections
        self._request_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def prove(self) -> None:
        """Record that the guard has accepted a request of this connection."""
        self._counted.prove(self)

    def abort(self) -> None:
        """Close the connection now, whatever is still to be sent."""
        self._counted.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and wait for the first request."""
        super().connection_made(transport)
        self._counted.add(self, self.loop.time())
        self._watch_requests()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._counted.discard(self)
        for due in (self._request_due, self._reading_due):
            if due is not None:
                due.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived, and begin or end the wait for a request."""
        super().handle_events()
        self._watch_requests()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch_requests()

    def pause_writing(self) -> None:
        """Wait for the browser to read."""
        super().pause_writing()
        self._reading_due = self.loop.call_later(SEND_S, self.abort)

    def resume_writing(self) -> None:
        """End that wait."""
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()

    def _watch_requests(self) -> None:
        """Let the time for a request run, unless a whole one is being answered."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.conn.their_state is not h11.SEND_BODY:
            if self._request_due is not None:
                self._request_due.cancel()
                self._request_due = None
        elif self._request_due is None:
            self._request_due = self.loop.call_later(REQUEST_S, self.abort)


def prove(scope: Scope) -> None:
    """Record that the guard has accepted this request, for the connection that it came by."""
    scope["state"][_KEY].prove()


class BoundedServer(uvicorn.Server):
    """A server that accepts connections one by one, within the bounds of `Connections`."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=REQUEST_BYTES_MAX,
            timeout_graceful_shutdown=1,
            proxy_headers=False,
        )
        super().__init__(config)
        self._connections = Connections()
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept from the listening sockets."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then let answers that have begun end."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets=sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._connections.wait_s(loop.time()))
            try:
                sock, peer = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)
                continue
            if _is_of_another_user(peer, sock.getsockname()):
                sock.close()
                continue
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(self._connection, sock)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self._connections)


def _is_of_another_user(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    return is_loopback(peer[0]) and not is_of_this_user(peer[:2], own[:2])
