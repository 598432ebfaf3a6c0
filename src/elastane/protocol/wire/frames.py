"""Frames of an authenticated session: length, authentication code, message.

    u32 length, little endian | 16 bytes of HMAC-SHA256 | msgpack body of `length` bytes

Each direction has a key of its own, and the code covers a 64-bit sequence number, the length and
the body. So a frame that was changed, replayed, reordered, left out or sent back is refused. The
length is checked before anything is stored. A codec that has refused once refuses from then on.
"""

from __future__ import annotations

import hmac
from typing import Generic, TypeVar

import msgspec

from elastane.errors import WireError
from elastane.protocol.limits import FRAME_BYTES_MAX
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.unreadable import UNREADABLE

CODE_BYTES = 16
HEAD_BYTES = 4 + CODE_BYTES
# Consumed bytes at the front of the buffer are dropped once there are this many.
_COMPACT_BYTES = 64 << 10

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class SessionKeys(msgspec.Struct, frozen=True):
    """The keys of one session, one for each direction."""

    to_coordinator: bytes
    to_agent: bytes

    def __repr__(self) -> str:
        return "SessionKeys(...)"


class FrameCodec(Generic[Incoming, Outgoing]):
    """Encodes sent messages, and collects and decodes received ones, for one side of a session.

    `feed` stores bytes; `next` returns one message at a time, so the receiver decides how much work
    it does at once. The caller stops feeding while `ready` is true and `waiting_bytes` is large.
    """

    def __init__(
        self,
        *,
        send_key: bytes,
        receive_key: bytes,
        decoder: msgspec.msgpack.Decoder[Incoming],
    ) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()
        self._start = 0
        self._fault: WireError | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were fed and not yet decoded."""
        return len(self._buffer) - self._start

    @property
    def ready(self) -> bool:
        """Whether `next` would yield a message, or refuse, without more bytes."""
        if self._fault is not None:
            return True
        length = self._length()
        return length is not None and (
            length > FRAME_BYTES_MAX or self.waiting_bytes >= HEAD_BYTES + length
        )

    def encode(self, message: Outgoing) -> bytes:
        """Return the frame of `message`; frames must be sent in the order of these calls.

        Raises WireError if the message is larger than any peer accepts; the sequence is then
        unchanged.
        """
        body = self._encoder.encode(message)
        if len(body) > FRAME_BYTES_MAX:
            raise WireError(
                f"a {type(message).__name__} of {len(body)} bytes",
                slug="frame-too-large",
                expected=f"at most {FRAME_BYTES_MAX} bytes",
            )
        length = len(body).to_bytes(4, "little")
        code = _code(self._send_key, self._sent, length, body)
        self._sent += 1
        return b"".join((length, code, body))

    def feed(self, data: bytes | memoryview) -> None:
        """Store received bytes; `next` checks them."""
        if self._fault is None:
            self._buffer += data

    def next(self) -> Incoming | None:
        """Return the next message, or None while its frame is incomplete.

        Raises WireError for a frame that does not belong to this session, and on every later call.
        """
        if self._fault is not None:
            raise self._fault
        length = self._length()
        if length is None:
            return None
        if length > FRAME_BYTES_MAX:
            raise self._refuse(f"a frame of {length} bytes, larger than any", "bad-frame")
        if self.waiting_bytes < HEAD_BYTES + length:
            return None
        return self._decode(self._cut(length))

    def _length(self) -> int | None:
        if self.waiting_bytes < HEAD_BYTES:
            return None
        return int.from_bytes(self._buffer[self._start : self._start + 4], "little")

    def _cut(self, length: int) -> bytes:
        """Remove the first frame, which is complete, from the buffer and return its body."""
        head = bytes(self._buffer[self._start : self._start + HEAD_BYTES])
        end = self._start + HEAD_BYTES + length
        body = bytes(self._buffer[self._start + HEAD_BYTES : end])
        self._start = end
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        elif self._start >= _COMPACT_BYTES:
            del self._buffer[: self._start]
            self._start = 0
        code = _code(self._receive_key, self._received, head[:4], body)
        if not hmac.compare_digest(code, head[4:]):
            raise self._refuse("a frame that is not the next one of this session", "bad-frame")
        self._received += 1
        return body

    def _decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except (*UNREADABLE, MemoryError) as error:
            refusal = self._refuse(f"a frame that holds no message: {error}", "bad-message")
            raise refusal from error

    def _refuse(self, what: str, slug: str) -> WireError:
        self._buffer.clear()
        self._start = 0
        self._fault = WireError(f"the peer sent {what}", slug=slug)
        return self._fault


def codec_for_agent(keys: SessionKeys) -> FrameCodec[ToAgent, ToCoordinator]:
    """Return the codec of the agent's side."""
    return FrameCodec(send_key=keys.to_coordinator, receive_key=keys.to_agent, decoder=_TO_AGENT)


def codec_for_coordinator(keys: SessionKeys) -> FrameCodec[ToCoordinator, ToAgent]:
    """Return the codec of the coordinator's side."""
    return FrameCodec(
        send_key=keys.to_agent, receive_key=keys.to_coordinator, decoder=_TO_COORDINATOR
    )


def _code(key: bytes, sequence: int, length: bytes, body: bytes) -> bytes:
    covered = b"".join((sequence.to_bytes(8, "little"), length, body))
    return hmac.digest(key, covered, "sha256")[:CODE_BYTES]


_TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent, strict=True)
_TO_COORDINATOR: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(
    ToCoordinator, strict=True
)
