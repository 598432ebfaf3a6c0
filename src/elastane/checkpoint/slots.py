"""The memory that a worker's share is copied into: a slot of the snapshot server, mapped here.

The bytes around each piece are written once into each slot; a save copies only the data, at the
speed of memory. Pages are touched when a slot is mapped: otherwise the first copy would take
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
    """One slot, prepared for one share of one layout."""

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


class CopySources:
    """The parts of a state's tensors in one share, in the order of a slot's places."""

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
        # Changed only by an optimizer's step.
        self.late = [on_cpu and is_stepped[number] for number in self._numbers]
        # Must be known to have their shapes and dtypes before they are copied or cut.
        at_once = [n for n, late in zip(self._numbers, self.late, strict=True) if not late]
        self.doubtful = sorted({*at_once, *(piece.tensor for _, piece, _ in self._parts)})

    def views(
        self, tensors: Sequence[torch.Tensor], others: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the parts of `tensors`; `others`, by number, replace some of those."""
        if others:
            tensors = [others.get(number, own) for number, own in enumerate(tensors)]
        found = [tensors[number] for number in self._numbers]
        for at, piece, offsets in self._parts:
            found[at] = part_of(found[at], piece, offsets)
        return found


def _stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of the tensors that optimizers change in their steps."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}).values()
                tensors = [each for each in state if isinstance(each, torch.Tensor)]
                found |= {held_of(each).data_ptr() for each in (parameter, *tensors)}
    return found


def part_of(tensor: torch.Tensor, piece: TensorPiece, offsets: Sequence[int]) -> torch.Tensor:
    """Return a piece of a tensor that itself begins at `offsets` of a larger one."""
    for dim, (at, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at - offsets[dim], length)
    return tensor
