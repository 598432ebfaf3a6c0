"""The way from one member to another over a process group: short messages, then much memory.

Owns the framing and how much is under way at once. It must not know what is sent. Sends and
receives of the group are used, and raise as the group does; StateError where a length cannot be.
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
# A message that fits costs one send; what is longer costs a second one.
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
MESSAGE_BYTES_MAX = 1 << 28
# So many sends or receives are under way at once: one alone leaves the connection idle.
_DEPTH = 3


# Called with all that is put or taken, in parts, while each is in the processor's cache: the parts
# are the same on both sides.
Seen: TypeAlias = Callable[[torch.Tensor], None]


class Channel(Protocol):
    """One side's end; what one says the other hears, and what one puts the other takes."""

    # Into pieces of this size both sides cut what they put and take.
    parcel_bytes: int

    def say(self, raw: bytes) -> None:
        """Send a message."""

    def hear(self) -> bytes:
        """Wait for a message."""

    def put(self, data: Iterable[torch.Tensor], seen: Seen) -> None:
        """Send flat CPU tensors of bytes; they must not change until this returns."""

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Fill flat CPU tensors of bytes, of the sizes that are put; each comes when it is full."""

    def close(self) -> None:
        """Let go of what this channel alone uses."""


class GroupChannel:
    """A channel to the rank `peer` of `group`."""

    # 8 MB: 100 MB in 13 to 19 ms over loopback; in staged pieces it was 57 to 78 (2026-11-21).
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
        under_way: deque[tuple[torch.Tensor, Work]] = deque()
        for each in data:
            under_way.append((each, self._send(each)))
            seen(each)
            if len(under_way) == _DEPTH:
                under_way.popleft()[1].wait()
        for _, work in under_way:
            work.wait()

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Fill flat CPU tensors of bytes, of the sizes that are put; each comes when it is full."""
        under_way: deque[tuple[torch.Tensor, Work]] = deque()
        for room in rooms:
            under_way.append((room, self._group.recv([room], self._peer, _TAG)))
            if len(under_way) == _DEPTH:
                yield _arrived(*under_way.popleft(), seen)
        while under_way:
            yield _arrived(*under_way.popleft(), seen)

    def close(self) -> None:
        """Nothing: the group is others' too."""

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
    """What a message says; raises StateError."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise unreadable(str(error)) from error


def unreadable(what: str) -> StateError:
    """What came is not of this version, or no message at all."""
    return StateError(
        f"what another worker said of its state cannot be read: {what}",
        slug="state-wire",
        expected="what another worker of this version of elastane sends",
        next_step="run the same version on all nodes",
    )
