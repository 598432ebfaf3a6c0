"""The door: accepts connections and holds those that have proved nothing within bounds.

At most `UNPROVEN_MAX` of them at once, each with one small buffer and a few seconds; at that bound
the one that waited longest makes room once its patience is over, and newcomers wait in the kernel.
A refused or unproven connection leaves nothing behind but a line of words for whoever asks.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from elastane.process.rpc.link import READ_BYTES, RpcLink
from elastane.process.rpc.sockets import host_of, make_room_for
from elastane.process.tls import TlsConfig, server_context
from elastane.process.unproven import Unproven
from elastane.protocol.limits import (
    DESCRIPTORS_SPARED,
    HANDSHAKE_TIMEOUT_S,
    SESSIONS_MAX,
    UNPROVEN_MAX,
    UNPROVEN_PATIENCE_S,
)
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.wire import NONCE_BYTES, ServerHandshake

if TYPE_CHECKING:
    import ssl

ServerLink = RpcLink[ToCoordinator, ToAgent]

# Connections that one turn of the event loop accepts, so that the others go on meanwhile.
_ACCEPTS_PER_TURN = 32
# Pause of the door when the system has no descriptor or memory for another connection.
_EXHAUSTED_PAUSE_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Access(msgspec.Struct, frozen=True):
    """What a peer must know to take part in a job.

    `changing` tells the secrets that count now, where they may change while the job runs.
    """

    job: str
    secret: bytes
    tls: TlsConfig | None = None
    changing: Callable[[], tuple[bytes, ...]] | None = None

    def secrets(self) -> tuple[bytes, ...]:
        """Return the secrets that count now; this side proves itself with the first."""
        return self.changing() if self.changing is not None else (self.secret,)

    def __repr__(self) -> str:
        return f"Access({self.job!r}, ...)"


class Host(Protocol):
    """Who takes over proven links from the door."""

    def proven(self, link: ServerLink) -> None:
        """Become this link's owner."""

    def readable(self, link: ServerLink) -> None:
        """As LinkOwner."""

    def ended(self, link: ServerLink) -> None:
        """As LinkOwner."""

    def refused(self, peer_host: str, reason: str) -> None:
        """A connection was turned away before it was proven."""

    def count_sessions(self) -> int:
        """Return how many proven links there are."""


class _Visitor:
    """A connection that has proved nothing yet."""

    def __init__(self, link: ServerLink, peer_host: str) -> None:
        self.link = link
        self.peer_host = peer_host
        self.task: asyncio.Task[None] | None = None


class Listener:
    """Accept from `listener` until closed; links that are proven go to `host`."""

    def __init__(self, listener: socket.socket, access: Access, host: Host) -> None:
        self._listener = listener
        self._access = access
        self._host = host
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._visitors = Unproven[_Visitor](UNPROVEN_MAX, UNPROVEN_PATIENCE_S)
        self._of_link: dict[ServerLink, _Visitor] = {}
        self._tls: ssl.SSLContext | None = None
        self._accepting = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to accept. Raises ConfigurationError where TLS files cannot be used."""
        self._tls = server_context(self._access.tls) if self._access.tls else None
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting, drop all that is unproven, close the listener."""
        self._pause()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()
        for visitor in self._visitors:
            self._evict(visitor, "the coordinator is closing")

    def count_unproven(self) -> int:
        """Return how many connections have proved nothing yet."""
        return len(self._visitors)

    # LinkOwner, while a link is unproven.

    def proven(self, link: ServerLink) -> None:
        """Hand the link over."""
        self._forget(self._of_link[link])
        link.owner = self._host
        self._host.proven(link)

    def readable(self, link: ServerLink) -> None:
        """Never called: an unproven link has nothing to read."""
        raise AssertionError("an unproven link became readable")

    def ended(self, link: ServerLink) -> None:
        """Tell of the refusal; not of a mere probe of the port."""
        visitor = self._of_link.get(link)
        if visitor is not None:
            self._forget(visitor)
        if not link.is_probe and not self._closed:
            self._host.refused(link.peer_host, link.reason)

    # Private.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._has_room():
                return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._exhausted(f"no connection can be accepted: {error.strerror}")
                return
            self._take_in(sock, host_of(address))

    def _has_room(self) -> bool:
        """Whether another connection fits; where not, accepting is paused until it may."""
        loop = asyncio.get_running_loop()
        if (wait_s := self._visitors.wait_s(loop.time())) > 0:
            self._pause(wait_s)
            return False
        if (oldest := self._visitors.make_room()) is not None:
            self._evict(oldest, "made room for others before it had proved itself")
        connections = self._host.count_sessions() + len(self._visitors)
        needed = connections + DESCRIPTORS_SPARED + 1
        if connections >= SESSIONS_MAX or make_room_for(needed) < needed:
            self._exhausted(f"{connections} connections are as many as this process may hold")
            return False
        return True

    def _take_in(self, sock: socket.socket, peer_host: str) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        nonce = os.urandom(NONCE_BYTES)
        first, *others = self._access.secrets()
        handshake = ServerHandshake(self._access.job, first, nonce, tuple(others))
        link = RpcLink(handshake, self, self._buffer)
        visitor = _Visitor(link, peer_host)
        self._visitors.add(visitor, loop.time())
        self._of_link[link] = visitor
        visitor.task = loop.create_task(self._welcome(visitor, sock))
        # Also where it is cancelled before its first step.
        visitor.task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)

    async def _welcome(self, visitor: _Visitor, sock: socket.socket) -> None:
        """Give an accepted socket to its link; with TLS this takes the TLS handshake."""
        loop = asyncio.get_running_loop()
        tls_timeout_s = HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: visitor.link, sock, ssl=self._tls, ssl_handshake_timeout=tls_timeout_s
            )
        except OSError as error:  # TLS failed: the link never began
            self._forget(visitor)
            sock.close()
            if not self._closed:
                self._host.refused(visitor.peer_host, f"no TLS session: {error}")

    def _evict(self, visitor: _Visitor, reason: str) -> None:
        self._forget(visitor)
        visitor.link.abort(reason)
        if visitor.task is not None:
            visitor.task.cancel()

    def _forget(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._of_link.pop(visitor.link, None)
        if not self._accepting and not self._closed and not self._visitors.is_full:
            self._resume()

    def _exhausted(self, what: str) -> None:
        """Leave newcomers in the kernel's queue for a while, and say so."""
        self._host.refused("", f"{what}; raise the limit of open files (ulimit -n)")
        self._pause(_EXHAUSTED_PAUSE_S)

    def _pause(self, for_s: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self._accepting:
            self._accepting = False
            loop.remove_reader(self._listener.fileno())
        if for_s is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(for_s, self._resume)

    def _resume(self) -> None:
        if self._closed or self._accepting:
            return
        self._accepting = True
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
