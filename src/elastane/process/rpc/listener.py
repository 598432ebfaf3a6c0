"""The listener: accepts connections, and bounds those that have not authenticated.

At most `UNPROVEN_MAX` of them are open, each with one small buffer and a few seconds. At that bound
the oldest one is closed once its minimum time is over, and new connections wait in the kernel. A
refused connection leaves only a reason for `Host.refused`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from elastane.errors import ConfigurationError
from elastane.process.endpoint import Unproven
from elastane.process.rpc.link import READ_BYTES, LinkOwner, RpcLink, host_of
from elastane.process.tls import TlsConfig, server_context
from elastane.protocol.limits import HANDSHAKE_TIMEOUT_S, UNPROVEN_TIMEOUT_S
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.wire import NONCE_BYTES, ServerHandshake

if TYPE_CHECKING:
    import ssl

# Unproven connections at a time; more wait in the kernel's backlog. An honest handshake takes about
# a millisecond, so 1,024 agents pass in a second.
UNPROVEN_MAX = 256
# Sessions of one coordinator: sixteen times the largest job that was measured.
SESSIONS_MAX = 16_384
# Descriptors that a coordinator leaves to the agent it runs in, for pidfds, logs and pipes.
DESCRIPTORS_SPARED = 128

ServerLink = RpcLink[ToCoordinator, ToAgent]

# The connections that one turn of the event loop accepts, so that other tasks proceed.
_ACCEPTS_PER_TURN = 32
# The pause in accepting when the system has no descriptor or memory for another connection.
_EXHAUSTED_PAUSE_S = 0.5
# The largest limit to ask for, because some programs walk all descriptors up to the limit.
_DESCRIPTORS_MAX = 65_536
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Access(msgspec.Struct, frozen=True):
    """The credentials that a peer needs to take part in a job.

    `changing` returns the secrets that are valid now, if they may change while the job runs.
    """

    job: str
    secret: bytes
    tls: TlsConfig | None = None
    changing: Callable[[], tuple[bytes, ...]] | None = None

    def secrets(self) -> tuple[bytes, ...]:
        """Return the secrets that are valid now; this side authenticates with the first."""
        return self.changing() if self.changing is not None else (self.secret,)

    def __repr__(self) -> str:
        return f"Access({self.job!r}, ...)"


class Host(LinkOwner[ToCoordinator, ToAgent], Protocol):
    """The owner of authenticated links, which it takes over from the listener."""

    def refused(self, peer_host: str, reason: str) -> None:
        """A connection was refused before it authenticated."""

    def count_sessions(self) -> int:
        """Return the number of authenticated links."""


class _Unproven:
    """A connection that has not authenticated."""

    def __init__(self, link: ServerLink, peer_host: str) -> None:
        self.link = link
        self.peer_host = peer_host
        self.task: asyncio.Task[None] | None = None


class Listener:
    """Accepts from `listener` until closed; passes authenticated links to `host`."""

    def __init__(self, listener: socket.socket, access: Access, host: Host) -> None:
        self._listener = listener
        self._access = access
        self._host = host
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._unproven = Unproven[_Unproven](UNPROVEN_MAX, UNPROVEN_TIMEOUT_S)
        self._of_link: dict[ServerLink, _Unproven] = {}
        self._tls: ssl.SSLContext | None = None
        self._accepting = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to accept; raises ConfigurationError if the TLS files cannot be used."""
        self._tls = server_context(self._access.tls) if self._access.tls else None
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting, drop every unproven connection, close the listening socket."""
        self._pause()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()
        for connection in self._unproven:
            self._evict(connection, "the coordinator is closing")

    def count_unproven(self) -> int:
        """Return how many connections have not authenticated."""
        return len(self._unproven)

    # LinkOwner, while a link is unproven.

    def proven(self, link: ServerLink) -> None:
        """Hand the link over to the host."""
        self._forget(self._of_link[link])
        link.owner = self._host
        self._host.proven(link)

    def readable(self, link: ServerLink) -> None:
        """Never called: an unproven link has no messages."""
        raise AssertionError("an unproven link became readable")

    def ended(self, link: ServerLink) -> None:
        """Report the refusal to the host, unless the connection was a mere probe of the port."""
        connection = self._of_link.get(link)
        if connection is not None:
            self._forget(connection)
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
            self._begin(sock, host_of(address))

    def _has_room(self) -> bool:
        """Return whether another connection fits; if not, pause accepting until it may."""
        loop = asyncio.get_running_loop()
        if (wait_s := self._unproven.wait_s(loop.time())) > 0:
            self._pause(wait_s)
            return False
        if (oldest := self._unproven.make_room()) is not None:
            self._evict(oldest, "closed for a newer connection before it had authenticated")
        connections = self._host.count_sessions() + len(self._unproven)
        needed = connections + DESCRIPTORS_SPARED + 1
        if connections >= SESSIONS_MAX or make_room_for(needed) < needed:
            self._exhausted(f"{connections} connections are the most that this process may hold")
            return False
        return True

    def _begin(self, sock: socket.socket, peer_host: str) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        nonce = os.urandom(NONCE_BYTES)
        first, *others = self._access.secrets()
        handshake = ServerHandshake(self._access.job, first, nonce, tuple(others))
        link = RpcLink(handshake, self, self._buffer)
        connection = _Unproven(link, peer_host)
        self._unproven.add(connection, loop.time())
        self._of_link[link] = connection
        connection.task = loop.create_task(self._attach(connection, sock))
        # Also if the task is cancelled before its first step.
        connection.task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)

    async def _attach(self, connection: _Unproven, sock: socket.socket) -> None:
        """Attach an accepted socket to its link; with TLS this includes the TLS handshake."""
        loop = asyncio.get_running_loop()
        tls_timeout_s = HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection.link, sock, ssl=self._tls, ssl_handshake_timeout=tls_timeout_s
            )
        except OSError as error:  # TLS failed, so the link never began
            self._forget(connection)
            sock.close()
            if not self._closed:
                self._host.refused(connection.peer_host, f"no TLS session: {error}")

    def _evict(self, connection: _Unproven, reason: str) -> None:
        self._forget(connection)
        connection.link.abort(reason)
        if connection.task is not None:
            connection.task.cancel()

    def _forget(self, connection: _Unproven) -> None:
        self._unproven.discard(connection)
        self._of_link.pop(connection.link, None)
        if not self._accepting and not self._closed and not self._unproven.is_full:
            self._resume()

    def _exhausted(self, what: str) -> None:
        """Leave new connections in the kernel's queue for a while, and report it."""
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


def make_room_for(descriptors: int) -> int:
    """Raise this process's soft descriptor limit towards `descriptors`; return the limit.

    A sufficient limit stays: workers inherit it, and few programs are tested with large ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= min(descriptors, ceiling):
        return _DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    wanted = min(max(descriptors, 2 * soft), ceiling)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def insist_on_room(nodes: int) -> None:
    """Check that this process can hold a connection for each node; raises ConfigurationError.

    Its own agent's connection is one of them, and would be refused until the job is given up.
    """
    needed = DESCRIPTORS_SPARED + nodes + 1  # one more for a connection that is not proven yet
    limit = make_room_for(needed)
    if limit < needed:
        raise ConfigurationError(
            f"coordinator: this process may open {limit} files, too few for the connections of"
            f" {nodes} {'node' if nodes == 1 else 'nodes'}",
            slug="descriptor-limit",
            expected=f"{needed} or more: {DESCRIPTORS_SPARED} for the agent's own processes and"
            " files, and one for each connection",
            next_step=f"ulimit -n {max(1024, 2 * needed)}",
        )
