"""One connection, from its first byte to its last: handshake, frames, and every bound on them.

A link calls its owner for three events: it is proven, it has a message, it has ended (once, with
the reason). Each call comes from the event loop, never from inside a call of the owner. A link
holds at most one frame and `INBOX_BYTES_MAX` of received data, and `SEND_BYTES_MAX` of data to
send.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from elastane.errors import ElastaneError, WireError
from elastane.protocol.limits import (
    CLOSE_S,
    FRAME_BYTES_MAX,
    HANDSHAKE_BYTES_MAX,
    HANDSHAKE_TIMEOUT_S,
)
from elastane.protocol.wire import FrameCodec, Handshake

# Bytes queued for a peer that does not read, before it is cut off; twice the largest frame fits.
SEND_BYTES_MAX = 8 << 20
# A peer for which bytes have been queued for this long without a break is cut off.
SEND_STALL_S = 10.0
# Received bytes that wait for their turn; beyond this the session is not read.
INBOX_BYTES_MAX = 64 << 10
# Sent bytes that a peer's kernel leaves unacknowledged for this long break the connection; the
# backstop of heartbeats, which notice in a few seconds.
TCP_USER_TIMEOUT_S = 20.0

assert HANDSHAKE_BYTES_MAX < INBOX_BYTES_MAX < FRAME_BYTES_MAX
assert SEND_BYTES_MAX >= 2 * FRAME_BYTES_MAX

READ_BYTES = 64 << 10
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 3
_KEEPALIVE_PROBES = 3

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class LinkOwner(Protocol[Incoming, Outgoing]):
    """The holder of a link, which receives the link's events."""

    def proven(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """The handshake succeeded; from now on `send` and `next_message` are allowed."""

    def readable(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """`next_message` has a message now."""

    def ended(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """The link is over, for `link.reason`; `next_message` still returns received messages."""


class RpcLink(asyncio.BufferedProtocol, Generic[Incoming, Outgoing]):
    """The asyncio protocol of one connection.

    `buffer`: memory that the loop receives into. Links of one loop may share it, because the data
    is copied out before the loop continues.
    """

    def __init__(
        self,
        handshake: Handshake[Incoming, Outgoing],
        owner: LinkOwner[Incoming, Outgoing],
        buffer: memoryview,
    ) -> None:
        self.owner = owner
        self.peer_host = ""
        self.local_host = ""
        self.reason = ""
        self.clean = False  # whether the peer closed it, rather than a broken network or this side
        self.fault: ElastaneError | None = None
        self.when_gone: Callable[[], None] | None = None
        self._handshake: Handshake[Incoming, Outgoing] | None = handshake
        self._codec: FrameCodec[Incoming, Outgoing] | None = None
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._paused = False
        self._over = False
        self._corrupt = False
        self._sent: asyncio.Future[None] | None = None

    # Called by the owner.

    @property
    def is_proven(self) -> bool:
        """Whether the handshake succeeded."""
        return self._codec is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._over

    @property
    def is_gone(self) -> bool:
        """Whether it has no connection, not even one that still sends its last bytes."""
        return self._transport is None

    @property
    def is_probe(self) -> bool:
        """Whether the peer never sent a byte, as in a check of the port."""
        return self._handshake is not None and self._handshake.received_bytes == 0

    @property
    def has_more(self) -> bool:
        """Whether `next_message` has a message now."""
        return self._codec is not None and not self._corrupt and self._codec.ready

    def send(self, message: Outgoing) -> None:
        """Enqueue a message; all messages of one turn of the loop are one write.

        Never blocks. A peer that does not read is disconnected at a bound. A link that is over
        drops the message.
        """
        assert self._codec is not None
        if self._over or self._transport is None:
            return
        try:
            frame = self._codec.encode(message)
        except WireError as error:
            self._fail(error)
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        unsent_bytes = self._outbox_bytes + self._transport.get_write_buffer_size()
        if unsent_bytes > SEND_BYTES_MAX:
            self.abort(f"the peer does not read: {unsent_bytes} bytes wait for it")

    def next_message(self) -> Incoming | None:
        """Return the next message, or None if there is none now or any more."""
        if self._codec is None or self._corrupt:
            return None
        try:
            message = self._codec.next()
        except WireError as error:
            self._corrupt = True
            self._fail(error)
            return None
        if self._paused and not self._over and not self._is_full():
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return message

    def close(self, reason: str) -> None:
        """Send the enqueued messages, then close; a peer that does not read has CLOSE_S."""
        if self._over or self._transport is None:
            return
        self._flush()
        self._transport.close()
        self._set_timer(CLOSE_S, self._transport.abort)
        self._end(reason)

    def abort(self, reason: str) -> None:
        """Close at once, and drop the enqueued messages."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def reset(self, reason: str) -> None:
        """Abort with a TCP reset, so that a living peer does not take it for the process's end."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            # Zero linger: the kernel sends a reset instead of an orderly end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort(reason)

    async def wait_sent(self) -> None:
        """Wait until the kernel has every sent message.

        For one waiter. Returns when the link ends; a peer that does not read ends it after
        SEND_STALL_S.
        """
        self._flush()
        if self._transport is None or not self._transport.get_write_buffer_size():
            return
        assert self._sent is None, "two waiters on one link"
        self._sent = asyncio.get_running_loop().create_future()
        try:
            await self._sent
        finally:
            self._sent = None

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._over:
            transport.abort()
            return
        tune(transport.get_extra_info("socket"))
        # pause_writing is then called for any unsent byte
        transport.set_write_buffer_limits(high=0)
        self.peer_host = host_of(transport.get_extra_info("peername"))
        self.local_host = host_of(transport.get_extra_info("sockname"))
        self._set_timer(HANDSHAKE_TIMEOUT_S, self._handshake_late)
        assert self._handshake is not None
        if hello := self._handshake.start():
            transport.write(hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory to receive into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes."""
        if self._over:
            return
        data = bytes(self._buffer[:nbytes])
        if self._codec is None:
            self._feed_handshake(data)
        else:
            self._codec.feed(data)
        if self._codec is not None and self._codec.ready and not self._over:
            if self._is_full() and not self._paused:
                self._paused = True
                assert self._transport is not None
                self._transport.pause_reading()
            self.owner.readable(self)

    def eof_received(self) -> None:
        """Let the transport close: a half-open session has no use."""
        self.clean = self.clean or not self._over
        self._end("the other side closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the transport."""
        self._clear_timer()
        self._transport = None
        self._wake_sender()
        if self.when_gone is not None:
            self.when_gone()
        self.clean = self.clean or not (exc or self._over)
        self._end(f"the connection broke: {exc}" if exc else "the other side closed the connection")

    def pause_writing(self) -> None:
        """The kernel's buffer is full: give the peer SEND_STALL_S to read everything."""
        if not self._over and self.is_proven:
            reason = f"the peer does not read: bytes have waited for it for {SEND_STALL_S:g} s"
            self._set_timer(SEND_STALL_S, lambda: self.abort(reason))

    def resume_writing(self) -> None:
        """The kernel has everything that was sent."""
        self._wake_sender()
        if not self._over and self.is_proven:
            self._clear_timer()

    # Private.

    def _feed_handshake(self, data: bytes) -> None:
        assert self._handshake is not None and self._transport is not None
        try:
            answer = self._handshake.feed(data)
        except WireError as error:
            self._transport.write(self._handshake.farewell)
            self._fail(error, gently=True)
            return
        if answer:
            self._transport.write(answer)
        if self._handshake.done:
            self._codec = self._handshake.codec()
            self._handshake = None
            self._clear_timer()
            self.owner.proven(self)

    def _handshake_late(self) -> None:
        assert self._handshake is not None
        got_bytes = self._handshake.received_bytes
        self._fail(
            WireError(
                f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s, {got_bytes} bytes received",
                slug="handshake-timeout",
            )
        )

    def _fail(self, error: ElastaneError, gently: bool = False) -> None:
        """End the link because of its peer's fault or an unsendable message."""
        if self._over:
            return
        self.fault = error
        if self._transport is not None:
            if gently:
                self._transport.close()
                self._set_timer(CLOSE_S, self._transport.abort)
            else:
                self._transport.abort()
        self._end(error.what)

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self.reason = reason
        self._outbox.clear()
        self._outbox_bytes = 0
        asyncio.get_running_loop().call_soon(self._notify_end)

    def _notify_end(self) -> None:
        self.owner.ended(self)

    def _flush(self) -> None:
        if self._outbox and not self._over and self._transport is not None:
            data = b"".join(self._outbox)
            self._outbox.clear()
            self._outbox_bytes = 0
            self._transport.write(data)

    def _wake_sender(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def _is_full(self) -> bool:
        return (
            self._codec is not None
            and self._codec.ready
            and self._codec.waiting_bytes > INBOX_BYTES_MAX
        )

    def _set_timer(self, delay_s: float, then: Callable[[], None]) -> None:
        self._clear_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, then)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def tune(sock: socket.socket) -> None:
    """Set the options of every control connection: small frames at once, dead peers detected."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    timeout_ms = round(TCP_USER_TIMEOUT_S * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def host_of(address: object) -> str:
    """Return the host of a socket address; an IPv4 address that came over IPv6 as IPv4."""
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    return host.removeprefix("::ffff:") if "." in host else host
