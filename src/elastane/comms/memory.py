"""Tensors as memory: what of them goes in one piece over a channel, and where it lies here.

Owns the cutting: both sides make the same parcels of the same pieces. What lies in one place goes
from there and to there; small or scattered things, and those of a device, through a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from elastane.comms.digest import raw_bytes
from elastane.comms.state_plan import Piece

# Smaller ones share a parcel.
_SMALL_BYTES = 1 << 18


def parcels(pieces: Iterable[Piece], parcel_bytes: int) -> Iterator[list[Piece]]:
    """Yield what goes in one piece: a part of one tensor, or several small ones."""
    small: list[Piece] = []
    held = 0
    for number, start, stop in pieces:
        if stop - start >= min(_SMALL_BYTES, parcel_bytes):
            for at in range(start, stop, parcel_bytes):
                yield [(number, at, min(at + parcel_bytes, stop))]
            continue
        if held + stop - start > parcel_bytes:
            yield small
            small, held = [], 0
        small.append((number, start, stop))
        held += stop - start
    if small:
        yield small


class TensorMemory:
    """The bytes of `tensors`, each in a row; `finish` after they were written."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.flat = [raw_bytes(tensor) for tensor in tensors]

    def part(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece, where they lie."""
        number, start, stop = piece
        return self.flat[number][start:stop]

    def gather(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """The bytes of a parcel on the CPU; a copy only where they do not lie there in a row."""
        parts = [self.part(piece).cpu() for piece in parcel]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def room(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """Where the bytes of a parcel may be written; `settle` takes them from there."""
        if len(parcel) == 1:
            part = self.part(parcel[0])
            if part.device.type == "cpu":
                return part
        return torch.empty(sum(stop - start for _, start, stop in parcel), dtype=torch.uint8)

    def settle(self, parcel: Sequence[Piece], room: torch.Tensor) -> None:
        """Take the bytes of a parcel from its room."""
        at = 0
        for piece in parcel:
            part = self.part(piece)
            if part.data_ptr() != room.data_ptr():
                part.copy_(room[at : at + part.numel()])
            at += part.numel()

    def finish(self) -> None:
        """Write back where a tensor did not lie in a row."""
        for tensor, data in zip(self.tensors, self.flat, strict=True):
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))
