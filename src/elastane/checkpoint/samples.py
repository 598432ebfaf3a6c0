"""Two numbers of each of some tensors, which show whether a tensor was changed.

Every update changes numbers all over a tensor, so a few of them show whether one was made. Version
counters do not show it: fused optimizers, writes to `.data`, and all changes of a sharded tensor
leave those of its memory as they are (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

# The bytes of the sampled numbers that are in memory, and those that are on devices.
Sample: TypeAlias = tuple[bytes, list[torch.Tensor]]


class Samples:
    """The first and the last number of each tensor, where they lie."""

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._sizes: list[int] = []
        self._here: list[memoryview] = []
        self._there: dict[torch.device, list[torch.Tensor]] = {}
        self.places: list[int] = []

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sample these tensors (`is_plain`) from here on; quick if they lie where the last did."""
        self._tensors = tensors
        places, sizes = [each.data_ptr() for each in tensors], [each.nbytes for each in tensors]
        if (places, sizes) != (self.places, self._sizes):
            self.places, self._sizes = places, sizes
            self._here, self._there = _ends_of(tensors)

    def take(self) -> Sample:
        """Return the numbers as they are; those of a device without waiting for it."""
        return b"".join(self._here), [torch.cat(ends) for ends in self._there.values()]

    def differ(self, sample: Sample) -> bool:
        """Whether the tensors differ from an earlier sample, or lie elsewhere."""
        if self.places != [each.data_ptr() for each in self._tensors]:
            return True
        (here, there), (now_here, now_there) = sample, self.take()
        return here != now_here or not all(map(torch.equal, there, now_there))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers that can be sampled: it is torch's own, dense and not empty."""
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    is_dense = tensor.layout is torch.strided and not tensor.is_meta
    return is_torchs and is_dense and tensor.numel() > 0


def _ends_of(
    tensors: Iterable[torch.Tensor],
) -> tuple[list[memoryview], dict[torch.device, list[torch.Tensor]]]:
    """Return the first and the last number of each tensor, as bytes: of the CPU, their memory.

    Python puts the memory of 8 together in 1 us, torch takes 5 us for views of it (2026-11-24).
    """
    here: list[memoryview] = []
    there: dict[torch.device, list[torch.Tensor]] = {}
    for each in tensors:
        pairs = zip(each.shape, each.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        for place in {0, last}:
            whole = each.detach().conj() if each.is_conj() else each.detach()
            number = whole.as_strided((1,), (1,), whole.storage_offset() + place).view(torch.uint8)
            if number.device.type == "cpu":
                here.append(number.numpy().data)
            else:
                there.setdefault(number.device, []).append(number)
    return here, there
