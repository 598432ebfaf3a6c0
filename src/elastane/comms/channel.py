"""A channel from one member to another over a process group: short messages, then bulk data.

Owns the framing, and how many sends are outstanding at once. It does not know the content. Sends
and receives are those of the group, and raise as the group does. A length that is out of bounds
raises StateError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias, TypeVar

import msgspec
import torch
from torch.distributed import ProcessGroup, Work

from elastane.errors import StateError

T = TypeVar("T")
_TAG = 0x5717
# A message that fits costs one send, a longer one two.
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
MESSAGE_BYTES_MAX = 1 << 28
# This many sends or receives are outstanding at once: one alone leaves the connection idle.
_DEPTH = 3


# Called with each part that is sent or received, while it is in the processor's cache. The parts
# are the same on both sides.
Seen: TypeAlias = Callable[[torch.Tensor], None]


class Channel(Protocol):
    """One end of a channel: `hear` receives what the other end's `say` sends, `take` its `put`."""

    # Both sides cut bulk data into parcels of this size.
    parcel_bytes: int

    def say(self, raw: bytes) -> None:
        """Send a message."""

    def hear(self) -> bytes:
        """Wait for a message."""

    def put(self, data: Iterable[torch.Tensor], seen: Seen) -> None:
        """Send flat CPU tensors of bytes; they must not change until this returns."""

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Receive into flat CPU tensors of bytes, of the sizes sent; yield each when it is full."""

    def close(self) -> None:
        """Release what only this channel uses."""


class GroupChannel:
    """A channel to the rank `peer` of `group`."""

    # 8 MB parcels: 100 MB take 13 to 19 ms over loopback; in staged pieces they took 57 to 78 ms
    # (2026-11-21).
    parcel_bytes = 8 << 20

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer

    def say(self, raw: bytes) -> None:
        """Send a message."""
        framed = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
        frame = framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")
        for part in (frame, framed[_FRAME_BYTES:]):
            if part:
                self._send(torch.frombuffer(bytearray(part), dtype=torch.uint8)).wait()

    def hear(self) -> bytes:
        """Wait for a message."""
        frame = self._receive(_FRAME_BYTES)
        length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
        if length > MESSAGE_BYTES_MAX:
            raise unreadable(f"a message of {length} bytes")
        raw = frame[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return raw + self._receive(length - len(raw)) if len(raw) < length else raw

    def put(self, data: Iterable[torch.Tensor], seen: Seen) -> None:
        """Send flat CPU tensors of bytes; they must not change until this returns."""
        outstanding: deque[tuple[torch.Tensor, Work]] = deque()
        for each in data:
            outstanding.append((each, self._send(each)))
            seen(each)
            if len(outstanding) == _DEPTH:
                outstanding.popleft()[1].wait()
        for _, work in outstanding:
            work.wait()

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Receive into flat CPU tensors of bytes, of the sizes sent; yield each when it is full."""
        outstanding: deque[tuple[torch.Tensor, Work]] = deque()
        for room in rooms:
            outstanding.append((room, self._group.recv([room], self._peer, _TAG)))
            if len(outstanding) == _DEPTH:
                yield _arrived(*outstanding.popleft(), seen)
        while outstanding:
            yield _arrived(*outstanding.popleft(), seen)

    def close(self) -> None:
        """Do nothing: the group has other users."""

    def _send(self, data: torch.Tensor) -> Work:
        return self._group.send([data], self._peer, _TAG)

    def _receive(self, count: int) -> bytes:
        data = torch.empty(count, dtype=torch.uint8)
        self._group.recv([data], self._peer, _TAG).wait()
        return bytes(data.numpy())


def _arrived(room: torch.Tensor, work: Work, seen: Seen) -> torch.Tensor:
    work.wait()
    seen(room)
    return room


def decoded(raw: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode a message; raises StateError."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise unreadable(str(error)) from error


def unreadable(what: str) -> StateError:
    """Return the error for a message of another version, or for bytes that are no message."""
    return StateError(
        f"a message about another worker's state cannot be read: {what}",
        slug="state-wire",
        expected="a message from a worker with this version of elastane",
        next_step="run the same version on all nodes",
    )
