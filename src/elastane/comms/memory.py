"""Tensors as memory: how their bytes are cut into parcels, and where each parcel lies.

Owns the cutting: both sides cut the same pieces into the same parcels. Contiguous memory of the CPU
is sent and received directly. Small or scattered pieces, and those of a device, go through a
buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from elastane.comms.digest import raw_bytes
from elastane.comms.state_plan import Piece

# Smaller pieces share a parcel.
_SMALL_BYTES = 1 << 18


def parcels(pieces: Iterable[Piece], parcel_bytes: int) -> Iterator[list[Piece]]:
    """Yield the contents of each parcel: a part of one tensor, or several small ones."""
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
    """The bytes of `tensors`, each contiguous; call `finish` after they were written."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.flat = [raw_bytes(tensor) for tensor in tensors]

    def part(self, piece: Piece) -> torch.Tensor:
        """Return the bytes of a piece, without a copy."""
        number, start, stop = piece
        return self.flat[number][start:stop]

    def gather(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """Return the bytes of a parcel on the CPU; a copy only if they are not contiguous there."""
        parts = [self.part(piece).cpu() for piece in parcel]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def buffer_for(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """Return a tensor to receive a parcel into; `scatter` moves the bytes to their tensors."""
        if len(parcel) == 1:
            part = self.part(parcel[0])
            if part.device.type == "cpu":
                return part
        return torch.empty(sum(stop - start for _, start, stop in parcel), dtype=torch.uint8)

    def scatter(self, parcel: Sequence[Piece], buffer: torch.Tensor) -> None:
        """Move the bytes of a parcel to their tensors."""
        at = 0
        for piece in parcel:
            part = self.part(piece)
            if part.data_ptr() != buffer.data_ptr():
                part.copy_(buffer[at : at + part.numel()])
            at += part.numel()

    def finish(self) -> None:
        """Write back tensors that are not contiguous."""
        for tensor, data in zip(self.tensors, self.flat, strict=True):
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))
