"""The memory that a worker's part of the image is copied into: the keeper's, mapped here.

What lies around the data of each piece is written once into each slot; a save copies the data
alone, at the pace of memory. Pages are touched when a slot is mapped, or the first copy would take
sixteen times as long.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from elastane.checkpoint.capture import Captured, held_of
from elastane.checkpoint.layout import Layout, TensorPiece, dtype_of
from elastane.checkpoint.shares import SaveShare


class Slot:
    """One slot, laid out for one share of one layout."""

    def __init__(self, fd: int, layout: Layout, share: SaveShare) -> None:
        self._memory = mmap.mmap(
            fd, max(1, share.end - share.first), mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        os.close(fd)
        image = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.places = []
        for piece in layout.within(share.first, share.end):
            frame, at = layout.frame(piece), piece.at - share.first
            data = at + len(frame.head)
            self._memory[at:data] = frame.head
            behind = data + frame.data_bytes
            self._memory[behind : behind + len(frame.tail)] = frame.tail
            dtype = dtype_of(layout.tensors[piece.tensor].dtype)
            self.places.append(image[data:behind].view(dtype).view(piece.shape))


class Sources:
    """The parts of a state's tensors that one share wants, in the order of a slot's places."""

    def __init__(
        self,
        layout: Layout,
        share: SaveShare,
        captured: Captured,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        pieces = layout.within(share.first, share.end)
        self._numbers = [piece.tensor for piece in pieces]
        offsets = {chunk.tensor: chunk.offsets for chunk in captured.chunks}
        self._parts = [
            (at, piece, offsets[piece.tensor])
            for at, piece in enumerate(pieces)
            if tuple(captured.tensors[piece.tensor].shape) != piece.shape
        ]
        stepped = _stepped(optimizers)
        on_cpu = all(tensor.device.type == "cpu" for tensor in captured.tensors)
        is_stepped = [tensor.data_ptr() in stepped for tensor in captured.tensors]
        # What changes in an optimizer's step alone.
        self.late = [on_cpu and is_stepped[number] for number in self._numbers]
        # Of which it has to be known before they are copied, or cut, that they are as they were.
        at_once = [n for n, late in zip(self._numbers, self.late, strict=True) if not late]
        self.doubtful = sorted({*at_once, *(piece.tensor for _, piece, _ in self._parts)})

    def views(
        self, tensors: Sequence[torch.Tensor], others: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return them, of these `tensors`; `others`, by number, are taken in place of those."""
        if others:
            tensors = [others.get(number, own) for number, own in enumerate(tensors)]
        found = [tensors[number] for number in self._numbers]
        for at, piece, offsets in self._parts:
            found[at] = part_of(found[at], piece, offsets)
        return found


def _stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return where the tensors lie that optimizers change in their steps."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}).values()
                tensors = [each for each in state if isinstance(each, torch.Tensor)]
                found |= {held_of(each).data_ptr() for each in (parameter, *tensors)}
    return found


def part_of(tensor: torch.Tensor, piece: TensorPiece, offsets: Sequence[int]) -> torch.Tensor:
    """Return a piece of a tensor that itself begins at `offsets` of a greater one."""
    for dim, (at, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at - offsets[dim], length)
    return tensor
