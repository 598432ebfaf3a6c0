"""The place of a job in its data, and what each rank of a world has of a step. Pure.

A place is (epoch, samples committed): one integer for each epoch, the same on all ranks, whatever
the world is. Step `s` of an epoch is the positions [s * B, min(n, (s + 1) * B)) of the epoch's
order; it is dealt to a world when the world computes it, and dealt again, whole, when it did not
commit. So every position is in exactly one committed step of its epoch.

Knows nothing of NumPy, torch, processes or samples: positions only. Fails by ConfigurationError
for sizes out of range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastane.data.checks import N_MAX, ceil_div, whole
from elastane.errors import ConfigurationError

__all__ = ["CommittedPosition", "Ledger", "LedgerShare", "cut"]


class CommittedPosition(NamedTuple):
    """Where a job is: so many samples of this epoch are committed, and all epochs before it."""

    epoch: int
    samples: int


class LedgerShare(NamedTuple):
    """What one rank has of one step, or of one micro-batch of it: positions [start, stop)."""

    step: int  # counted from the beginning of epoch 0, so it names the epoch too
    epoch: int
    micro: int  # of `micro_batches` in this step, each with its own share
    micro_batches: int
    start: int
    stop: int
    batch_start: int  # the whole step's positions, over all ranks
    batch_stop: int
    world_size: int  # or into how many virtual shards the step was cut
    shard: int = 0  # which of them this is; 0 where there are none

    @property
    def samples(self) -> int:
        """How many positions are this rank's; 0 where the step has fewer than the world."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """What the local mean loss is multiplied by before backward().

        DDP averages gradients over ranks. The sum over all micro-batches and ranks of local mean
        times weight, divided by the world, is the mean over the step's samples. The same holds of
        virtual shards, where their gradients are averaged.
        """
        return self.samples * self.world_size / (self.batch_stop - self.batch_start)

    @property
    def is_last(self) -> bool:
        """Whether this is the step's last micro-batch, after which the optimizer steps."""
        return self.micro == self.micro_batches - 1

    @property
    def reads(self) -> tuple[int, int]:
        """The positions to read: the share, or for an empty one a stand-in, the step's first.

        A rank without samples must take part in the reduction all the same, with forward and
        backward as written. With weight 0 the stand-in adds nothing to the gradient. Its loss can
        only be NaN or infinite where that of the rank that owns the sample is so too.
        """
        if self.samples:
            return self.start, self.stop
        return self.batch_start, self.batch_start + 1


def cut(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """Return contiguous part `part` of `parts` of [start, stop); parts differ by one at most."""
    length = stop - start
    return start + length * part // parts, start + length * (part + 1) // parts


@dataclass(frozen=True)
class Ledger:
    """How the epochs of a dataset fall into steps, whoever computes them."""

    n: int
    global_batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        # As plain ints: they go into states, and those into JSON.
        object.__setattr__(self, "n", whole("n", self.n, 0, N_MAX))
        size = whole("global_batch_size", self.global_batch_size, 1)
        object.__setattr__(self, "global_batch_size", size)
        object.__setattr__(self, "drop_last", bool(self.drop_last))
        if not self.steps_per_epoch:
            raise ConfigurationError(
                f"n is {self.n} with global_batch_size {self.global_batch_size} and drop_last "
                f"{self.drop_last}: an epoch has no step",
                expected="at least one sample, and with drop_last one whole global batch",
                next_step="check the dataset, lower global_batch_size or set drop_last=False",
                slug="data-no-step",
            )

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch; the partial one counts unless `drop_last`."""
        size = self.global_batch_size
        return self.n // size if self.drop_last else ceil_div(self.n, size)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples that the steps of an epoch hold."""
        return min(self.n, self.steps_per_epoch * self.global_batch_size)

    def span(self, step: int) -> tuple[int, int]:
        """Return the positions of a step in the order of its epoch."""
        start = step % self.steps_per_epoch * self.global_batch_size
        return start, min(self.n, start + self.global_batch_size)

    def place_before(self, step: int) -> CommittedPosition:
        """Return the place of a job that has committed all steps before this one."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return CommittedPosition(epoch, within * self.global_batch_size)

    def step_at(self, place: CommittedPosition) -> int:
        """Return the step that comes next at a place; ConfigurationError for no place of ours."""
        within, rest = divmod(place.samples, self.global_batch_size)
        if rest or within >= self.steps_per_epoch:
            raise ConfigurationError(
                f"samples is {place.samples} in epoch {place.epoch}",
                expected=f"a multiple of {self.global_batch_size} below {self.samples_per_epoch}",
                next_step="load a state that state_dict() gave, of the same sizes",
                slug="data-state",
            )
        return place.epoch * self.steps_per_epoch + within

    def deal_epoch(
        self, step: int, rank: int, world_size: int, micro_batches: int = 1, shards: int = 0
    ) -> Iterator[LedgerShare]:
        """Give this rank's shares from a step to the end of its epoch.

        With `shards`, those that `deal_shards` gives, and micro-batches do not count.
        """
        for s in range(step, (step // self.steps_per_epoch + 1) * self.steps_per_epoch):
            if shards:
                yield from self.deal_shards(s, rank, world_size, shards)
            else:
                yield from self.deal(s, rank, world_size, micro_batches)

    def deal(
        self, step: int, rank: int, world_size: int, micro_batches: int = 1
    ) -> Iterator[LedgerShare]:
        """Give this rank's share of a step, cut into its micro-batches.

        A contiguous part of the step, as even as it goes; of each part the same again for the
        micro-batches. Every rank has all micro-batches, so that all call the same collectives.
        """
        epoch, (low, high) = step // self.steps_per_epoch, self.span(step)
        first, end = cut(low, high, rank, world_size)
        for micro in range(micro_batches):
            start, stop = cut(first, end, micro, micro_batches)
            yield LedgerShare(step, epoch, micro, micro_batches, start, stop, low, high, world_size)

    def deal_shards(
        self, step: int, rank: int, world_size: int, shards: int
    ) -> Iterator[LedgerShare]:
        """Give this rank's virtual shards of a step, each as its own micro-batch.

        The step is cut into `shards`, whatever the world is; a rank has as many of them, one after
        the other, as it goes evenly. In a world of more ranks than shards some have none.
        """
        epoch, (low, high) = step // self.steps_per_epoch, self.span(step)
        first, end = cut(0, shards, rank, world_size)
        for shard in range(first, end):
            start, stop = cut(low, high, shard, shards)
            place = shard - first, end - first
            yield LedgerShare(step, epoch, *place, start, stop, low, high, shards, shard)
