"""The ranks that save and restore together, and what they tell each other.

Over the process group that the script has: of a job that recovers in place its own, else the
default one; where that moves data on GPUs only, a group of gloo's beside it. A process without a
group is alone. Fails as collectives fail: what was to be agreed is not agreed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastane.checkpoint.patience import PeerTimeout

_PATIENCE = PeerTimeout()


class Members(Protocol):
    """All ranks call the same in the same order."""

    @property
    def rank(self) -> int:
        """This one's."""

    @property
    def size(self) -> int:
        """How many there are."""

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what each rank says, by rank: as many numbers of 64 bits as this one.

        Here ranks meet that come when the script lets them: one that waits for long is told.
        """

    def texts(self, said: bytes) -> list[bytes]:
        """Return what each rank says, by rank."""

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Give `source`'s bytes to all."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what this one says."""
        return [list(numbers)]

    def texts(self, said: bytes) -> list[bytes]:
        """Return what this one says."""
        return [said]

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Nobody else is there."""


class OfGroup:
    """The ranks of a process group that takes tensors of the CPU."""

    def __init__(self, group: Any, patience: PeerTimeout = _PATIENCE) -> None:
        self._group, self._patience = group, patience

    @property
    def rank(self) -> int:
        """This one's; of a job it may change between two calls."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self._group)

    def numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what each rank says."""
        with self._patience:
            return self._numbers(numbers)

    def _numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        said = torch.tensor(numbers, dtype=torch.int64)
        heard = [torch.zeros_like(said) for _ in range(self.size)]
        dist.all_gather(heard, said, group=self._group)
        return [each.tolist() for each in heard]

    def texts(self, said: bytes) -> list[bytes]:
        """Return what each rank says; two collectives."""
        lengths = [length for (length,) in self._numbers([len(said)])]
        own = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if said:
            own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        heard = [torch.zeros_like(own) for _ in lengths]
        dist.all_gather(heard, own, group=self._group)
        pairs = zip(heard, lengths, strict=True)
        return [bytes(each[:length].numpy()) for each, length in pairs]

    def spread(self, data: torch.Tensor, source: int) -> None:
        """Give `source`'s bytes to all."""
        dist.broadcast(data, group=self._group, group_src=source)


def of_process() -> Members:
    """Return the ranks of the default process group; collective where gloo has to be made."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Alone()
    if "gloo" in str(dist.get_backend()):
        return OfGroup(dist.group.WORLD)
    with _PATIENCE:
        return OfGroup(dist.new_group(backend="gloo"))
