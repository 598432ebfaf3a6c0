"""The agent's side of a session: `connect`, and messages in both directions.

Every way in which a connection can fail to become a session is a typed error with a next step; a
pure mapping makes it from the operating system's and the wire's errors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from elastane.errors import (
    ElastaneError,
    MembershipError,
    RendezvousRefusedError,
    WireError,
)
from elastane.process.rpc.link import RpcLink
from elastane.process.tls import TlsConfig, client_context
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.wire import NONCE_BYTES, ClientHandshake

ClientLink = RpcLink[ToAgent, ToCoordinator]
# What the loop receives at once; a session receives a few hundred bytes a second.
_READ_BYTES = 16 << 10
# A name may have several addresses; after this long the next one is tried in parallel.
_NEXT_ADDRESS_S = 0.25


class Session:
    """An authenticated session with a coordinator, made by `connect`; for one event loop."""

    def __init__(self, handshake: ClientHandshake) -> None:
        self.link: ClientLink = RpcLink(handshake, self, memoryview(bytearray(_READ_BYTES)))
        self._woken: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether either side has ended the session."""
        return self.link.is_over

    @property
    def reason(self) -> str:
        """The cause of the session's end; empty before it."""
        return self.link.reason

    def send(self, message: ToCoordinator) -> None:
        """Enqueue a message; never blocks. After the end of the session the message is dropped."""
        self.link.send(message)

    async def receive(self) -> ToAgent | None:
        """Return the next message, or None once the session is over; `reason` has the cause.

        For one receiver at a time. Messages that arrived before the end are still returned. Raises
        WireError if the coordinator broke the protocol, or if a sent message exceeds a frame.
        """
        while True:
            message = self.link.next_message()
            if message is not None:
                return message
            if self.link.fault is not None:
                raise self.link.fault
            if self.link.is_over and not self.link.has_more:
                return None
            await self._wait_woken()

    def close(self, reason: str) -> None:
        """Send the enqueued messages, then close."""
        self.link.close(reason)

    def reset(self, reason: str) -> None:
        """Close at once with a TCP reset, because this process lives on and may connect again."""
        self.link.reset(reason)

    async def drain(self) -> None:
        """Wait until the kernel has all sent messages, or the session is over.

        Bounded by `SEND_STALL_S`, the time that a peer has to read.
        """
        await self.link.wait_sent()

    async def wait_proven(self) -> None:
        """Wait until both sides have authenticated; raises the error that prevented it."""
        while not self.link.is_proven and not self.link.is_over:
            await self._wait_woken()
        if not self.link.is_proven:
            raise self.link.fault or ClosedEarlyError(self.link.reason)

    # LinkOwner.

    def proven(self, link: ClientLink) -> None:
        """Wake the waiting receiver."""
        self._wake()

    def readable(self, link: ClientLink) -> None:
        """Wake the waiting receiver."""
        self._wake()

    def ended(self, link: ClientLink) -> None:
        """Wake the waiting receiver."""
        self._wake()

    async def _wait_woken(self) -> None:
        assert self._woken is None, "two receivers on one session"
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


async def connect(
    host: str, port: int, job: str, secret: bytes, tls: TlsConfig | None, timeout_s: float
) -> Session:
    """Return a session with the coordinator of `job` at `host`:`port`.

    Raises RendezvousRefusedError if another try cannot help (wrong job, token or version),
    ConfigurationError for TLS files, and MembershipError for faults that may pass: no listener, an
    unresolved name, no answer within `timeout_s`, or another program at that port.
    """
    context = client_context(tls) if tls else None
    session = Session(ClientHandshake(job, secret, os.urandom(NONCE_BYTES)))
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    loop = asyncio.get_running_loop()
    linked = False
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(
                lambda: session.link,
                host,
                port,
                ssl=context,
                server_hostname=host if context else None,
                ssl_handshake_timeout=timeout_s if context else None,
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
                family=socket.AF_UNSPEC,
            )
            linked = True
            await session.wait_proven()
    except (OSError, ElastaneError, ClosedEarlyError) as error:
        session.link.abort("could not be opened")
        timed_out = isinstance(error, TimeoutError)
        raise explain(error, endpoint, timeout_s if timed_out else 0.0, linked) from error
    except asyncio.CancelledError:
        session.link.abort("cancelled")
        raise
    return session


# Another try cannot help with these: the configuration must change.
_FINAL = ("wrong-job", "wrong-token", "protocol-version")
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class ClosedEarlyError(Exception):
    """The other side closed the connection during the handshake."""


def explain(error: Exception, endpoint: str, timeout_s: float, linked: bool) -> ElastaneError:
    """Return the error to raise for `error`; `linked`: TCP and TLS had succeeded."""
    if isinstance(error, WireError):
        return _of_wire(error, endpoint)
    if isinstance(error, ElastaneError):
        return error
    if isinstance(error, TimeoutError):
        return _of_timeout(error, endpoint, timeout_s, linked)
    if isinstance(error, ClosedEarlyError):
        return _unserved(
            f"{endpoint} closed the connection before it proved to be a coordinator: {error}",
            "endpoint-closed",
            "it may be closing, busy, or speak TLS; check --rdzv-endpoint",
        )
    if isinstance(error, socket.gaierror):
        return _unserved(
            f"the host of {endpoint} does not resolve: {error.strerror}",
            "endpoint-unresolvable",
            f"check --rdzv-endpoint, and: getent hosts {endpoint.rpartition(':')[0]}",
        )
    if type(error).__module__ == "ssl":
        return _of_tls(error, endpoint)
    return _of_system(error, endpoint)


def _of_wire(error: WireError, endpoint: str) -> ElastaneError:
    kind = RendezvousRefusedError if error.slug in _FINAL else MembershipError
    return kind(
        f"{endpoint}: {error.what}",
        slug=error.slug,
        where=error.where,
        expected=error.expected,
        next_step=error.next_step or "check --rdzv-endpoint, and elastane's version on both hosts",
    )


def _of_timeout(
    error: TimeoutError, endpoint: str, timeout_s: float, linked: bool
) -> MembershipError:
    did = "took the connection but did not answer" if linked else "did not take a connection"
    bound = f"within {timeout_s:g} s" if timeout_s else f"in time: {error}"
    return _unserved(
        f"{endpoint} {did} {bound}",
        "endpoint-timeout",
        "check --rdzv-endpoint, firewalls, and whether that host lives",
    )


def _of_tls(error: Exception, endpoint: str) -> MembershipError:
    if "CERTIFICATE" in str(error).upper():
        return _unserved(
            f"{endpoint}: the certificates do not fit: {error}",
            "tls",
            "give all nodes certificates of the same tls_ca",
        )
    return _unserved(
        f"{endpoint}: no TLS session: {error}",
        "tls",
        "use TLS on all nodes or on none: --rdzv-conf tls_cert=...,tls_key=...",
    )


def _of_system(error: Exception, endpoint: str) -> MembershipError:
    number = error.errno if isinstance(error, OSError) else None
    # If several addresses failed, asyncio joins the errors' texts and drops their numbers.
    refused = number == errno.ECONNREFUSED or f"Errno {errno.ECONNREFUSED}]" in str(error)
    if refused:
        return _unserved(
            f"no process listens at {endpoint}",
            "endpoint-unserved",
            "start the agent on that host, or check --rdzv-endpoint",
        )
    if number in _UNREACHABLE:
        return _unserved(
            f"{endpoint} cannot be reached: {error}",
            "endpoint-unreachable",
            f"check routes and: ping {endpoint.rpartition(':')[0]}",
        )
    return _unserved(
        f"{endpoint}: the connection failed: {error}",
        "endpoint-closed",
        "check --rdzv-endpoint, and TLS on both sides or on neither",
    )


def _unserved(what: str, slug: str, next_step: str) -> MembershipError:
    return MembershipError(what, slug=slug, expected="an elastane coordinator", next_step=next_step)
