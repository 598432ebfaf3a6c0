"""One connection, from its first byte to its last: handshake, frames, and every bound on them.

A link tells its owner three things, each from the event loop and never from inside a call that
the owner made: it is proven, it has something to take, it has ended (once, with the reason). It
holds at most one frame and `INBOX_BYTES_MAX` of what was received, and `SEND_BYTES_MAX` of what
is to be sent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from elastane.errors import ElastaneError, WireError
from elastane.process.rpc.sockets import host_of, tune
from elastane.protocol.limits import (
    CLOSE_S,
    HANDSHAKE_TIMEOUT_S,
    INBOX_BYTES_MAX,
    SEND_BYTES_MAX,
    SEND_STALL_S,
)
from elastane.protocol.wire import FrameCodec, Handshake

READ_BYTES = 64 << 10

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class LinkOwner(Protocol[Incoming, Outgoing]):
    """Who holds a link, and hears of it."""

    def proven(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """The handshake succeeded; from now on `send` and `next_message` are allowed."""

    def readable(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """`next_message` would yield something now."""

    def ended(self, link: RpcLink[Incoming, Outgoing]) -> None:
        """The link is over, `link.reason` says why; what was received can still be taken."""


class RpcLink(asyncio.BufferedProtocol, Generic[Incoming, Outgoing]):
    """The asyncio protocol of one connection.

    `buffer` is where the loop receives to; links of one loop may share it, for its content is
    taken over before the loop goes on.
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
        self._spoilt = False
        self._sent: asyncio.Future[None] | None = None

    # What the owner asks.

    @property
    def is_proven(self) -> bool:
        """Whether the handshake succeeded."""
        return self._codec is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent or will arrive."""
        return self._over

    @property
    def is_gone(self) -> bool:
        """Whether it has no connection, not even one that still sends its last bytes."""
        return self._transport is None

    @property
    def is_probe(self) -> bool:
        """Whether the peer never sent a byte, as a check of the port does."""
        return self._handshake is not None and self._handshake.received_bytes == 0

    @property
    def has_more(self) -> bool:
        """Whether `next_message` would yield something at once."""
        return self._codec is not None and not self._spoilt and self._codec.ready

    def send(self, message: Outgoing) -> None:
        """Enqueue a message; all that is enqueued in one turn of the loop is one write.

        Never blocks. A peer that does not read is cut at a bound; on a link that is over the
        message is dropped.
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
        """Return the next message, or None where there is none (yet, or for ever)."""
        if self._codec is None or self._spoilt:
            return None
        try:
            message = self._codec.next()
        except WireError as error:
            self._spoilt = True
            self._fail(error)
            return None
        if self._paused and not self._over and not self._is_full():
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return message

    def close(self, reason: str) -> None:
        """Send what is enqueued, then close; a peer that does not read has CLOSE_S for it."""
        if self._over or self._transport is None:
            return
        self._flush()
        self._transport.close()
        self._set_timer(CLOSE_S, self._transport.abort)
        self._end(reason)

    def abort(self, reason: str) -> None:
        """Close at once, and drop what is enqueued."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def reset(self, reason: str) -> None:
        """Abort so that the peer, if it lives, does not take this for the end of the process."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            # Zero linger: the kernel sends a reset instead of an orderly end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort(reason)

    async def wait_sent(self) -> None:
        """Wait until nothing that was sent waits in this process any more.

        For one waiter. Ends with the link; a peer that does not read ends it in SEND_STALL_S.
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

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._over:
            transport.abort()
            return
        tune(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=0)  # so pause_writing tells of any unsent byte
        self.peer_host = host_of(transport.get_extra_info("peername"))
        self.local_host = host_of(transport.get_extra_info("sockname"))
        self._set_timer(HANDSHAKE_TIMEOUT_S, self._handshake_late)
        assert self._handshake is not None
        if hello := self._handshake.start():
            transport.write(hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take over what was received."""
        if self._over:
            return
        data = bytes(self._buffer[:nbytes])
        if self._codec is None:
            self._shake(data)
        else:
            self._codec.feed(data)
        if self._codec is not None and self._codec.ready and not self._over:
            if self._is_full() and not self._paused:
                self._paused = True
                assert self._transport is not None
                self._transport.pause_reading()
            self.owner.readable(self)

    def eof_received(self) -> None:
        """Let the transport close: a half-open session is of no use."""
        self.clean = self.clean or not self._over
        self._end("the other side closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the transport."""
        self._clear_timer()
        self._transport = None
        self._wake_sender()
        if self.when_gone is not None:
            self.when_gone()
        self.clean = self.clean or not (exc or self._over)
        self._end(f"the connection broke: {exc}" if exc else "the other side closed the connection")

    def pause_writing(self) -> None:
        """The kernel takes no more: the peer has SEND_STALL_S to read it all."""
        if not self._over and self.is_proven:
            reason = f"the peer does not read: bytes have waited for it for {SEND_STALL_S:g} s"
            self._set_timer(SEND_STALL_S, lambda: self.abort(reason))

    def resume_writing(self) -> None:
        """All that was sent is with the kernel."""
        self._wake_sender()
        if not self._over and self.is_proven:
            self._clear_timer()

    # Private.

    def _shake(self, data: bytes) -> None:
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
        """End the link for its peer's (or a message's) fault."""
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
        asyncio.get_running_loop().call_soon(self._tell_end)

    def _tell_end(self) -> None:
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
