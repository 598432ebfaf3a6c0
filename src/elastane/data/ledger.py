"""The position of a job in its data, and each rank's share of a step. Pure.

The job's position is (epoch, samples committed): one integer for each epoch, equal on all ranks in
every world. Step `s` of an epoch consists of the positions [s * B, min(n, (s + 1) * B)) of the
epoch's order. A step is divided among the ranks of the world that computes it, and is retried as a
whole if it was not committed. Hence each position is in exactly one committed step of its epoch.

A step may also be committed without the shares of members that were lost in it (`ElasticLoader`).
The epoch then *owes* these positions: each later step takes some of them in addition to its own.
Further steps at the end of the epoch take the rest; they have the number of its last step.

The module knows nothing of NumPy, torch, processes or samples. How it fails: ConfigurationError for
sizes out of range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from elastane.data.checks import N_MAX, ceil_div, whole
from elastane.errors import ConfigurationError

# Positions [start, stop), one range after another.
Spans: TypeAlias = tuple[tuple[int, int], ...]
# A step takes at most this fraction (1/4) of a global batch of owed positions, since a worker's
# memory may have room for little more than its share.
_OWED_PART = 4


class CommittedPosition(NamedTuple):
    """A job's position: all epochs before `epoch` are committed, and `samples` of this epoch."""

    epoch: int
    samples: int


class LedgerShare(NamedTuple):
    """One rank's share of a step, or of one micro-batch of it: [start, stop).

    `start` and `stop` number the positions of the step. The step's own positions begin at
    `batch_start`, and owed positions come before them.
    """

    step: int  # Counted from the start of epoch 0, so it determines the epoch.
    epoch: int
    micro: int  # The number of the micro-batch among `micro_batches`, each with its own share.
    micro_batches: int
    start: int
    stop: int
    batch_start: int  # The whole step's own positions, over all ranks.
    batch_stop: int
    world_size: int  # Or the number of virtual shards of the step.
    shard: int = 0  # The number of the virtual shard; 0 without any.
    owed: Spans = ()  # The owed positions of the whole step.

    @property
    def samples(self) -> int:
        """The number of this rank's positions; 0 if the step has fewer positions than ranks."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """The factor of the local mean loss before backward().

        DDP averages gradients over ranks. The sum of local mean times weight over all micro-batches
        and ranks, divided by the world size, is the mean over the step's samples. The same holds
        for virtual shards if their gradients are averaged.
        """
        in_step = self.batch_stop - self.batch_start + length_of_spans(self.owed)
        return self.samples * self.world_size / in_step

    @property
    def is_last(self) -> bool:
        """Whether this is the step's last micro-batch, after which the optimizer steps."""
        return self.micro == self.micro_batches - 1

    @property
    def is_further(self) -> bool:
        """Whether the step has owed positions only: the epoch's own steps are committed."""
        return self.batch_start == self.batch_stop

    @property
    def spans(self) -> Spans:
        """The positions of the share."""
        return self._positions(self.start, self.stop)

    @property
    def reads(self) -> Spans:
        """The positions to read: the share, or for an empty share the step's first position.

        A rank without samples must still take part in the reduction, with forward and backward.
        With weight 0 the stand-in adds nothing to the gradient. Its loss is NaN or infinite only if
        that of the sample's owner is too.
        """
        if self.samples:
            return self.spans
        first = self.batch_start - length_of_spans(self.owed)
        return self._positions(first, first + 1)

    def _positions(self, start: int, stop: int) -> Spans:
        if not self.owed or start >= self.batch_start:
            return ((start, stop),) if start < stop else ()
        before = start - (self.batch_start - length_of_spans(self.owed))
        count = min(stop, self.batch_start) - start
        of_owed = split(split(self.owed, before)[1], count)[0]
        return (*of_owed, *self._positions(self.batch_start, stop))


def length_of_spans(spans: Spans) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in spans)


def split(spans: Spans, count: int) -> tuple[Spans, Spans]:
    """Return the first `count` positions, or all if there are fewer, and the rest."""
    first: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(spans):
        taken = min(count, stop - start)
        if taken < stop - start:
            if taken:
                first.append((start, start + taken))
            return tuple(first), ((start + taken, stop), *spans[number + 1 :])
        first.append((start, stop))
        count -= taken
    return tuple(first), ()


def owed_per_step(global_batch_size: int) -> int:
    """Return the most owed positions that a step takes in addition to its own."""
    return ceil_div(global_batch_size, _OWED_PART)


class VirtualDeal(NamedTuple):
    """The virtual shards of a step, of which one rank has [first, end). No shards: there are none.

    Results depend on the number of shards, and not on which rank has which.
    """

    shards: int
    first: int
    end: int


NO_VIRTUAL_SHARDS = VirtualDeal(0, 0, 0)


def cut(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """Return contiguous part `part` of `parts` of [start, stop); sizes differ by at most one."""
    length = stop - start
    return start + length * part // parts, start + length * (part + 1) // parts


def dealt_evenly(shards: int, world_size: int) -> tuple[range, ...]:
    """Return the virtual shards of each rank: consecutive ones, and as evenly as possible.

    In a world of more ranks than shards some ranks have none.
    """
    return tuple(range(*cut(0, shards, rank, world_size)) for rank in range(world_size))


class Owing(NamedTuple):
    """The positions that lost workers left undone in an epoch, which later steps take.

    `is_further`: all steps of the epoch's own are committed.
    """

    spans: Spans
    is_further: bool


NOTHING_OWED = Owing((), is_further=False)


@dataclass(frozen=True)
class Ledger:
    """How the epochs of a dataset are divided into steps, in every world."""

    n: int
    global_batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        # As plain ints, since they become part of states and of JSON.
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
        """The number of steps of an epoch; a partial one counts unless `drop_last`."""
        size = self.global_batch_size
        return self.n // size if self.drop_last else ceil_div(self.n, size)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples in the steps of an epoch."""
        return min(self.n, self.steps_per_epoch * self.global_batch_size)

    def span(self, step: int) -> tuple[int, int]:
        """Return the positions of a step in the order of its epoch."""
        start = step % self.steps_per_epoch * self.global_batch_size
        return start, min(self.n, start + self.global_batch_size)

    def place_before(self, step: int) -> CommittedPosition:
        """Return the position of a job that has committed all steps before this one."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return CommittedPosition(epoch, within * self.global_batch_size)

    def step_at(self, place: CommittedPosition) -> int:
        """Return the next step at a position; raises ConfigurationError for an impossible one."""
        within, rest = divmod(place.samples, self.global_batch_size)
        if rest or within >= self.steps_per_epoch:
            raise ConfigurationError(
                f"samples is {place.samples} in epoch {place.epoch}",
                expected=f"a multiple of {self.global_batch_size} below {self.samples_per_epoch}",
                next_step="load a state that state_dict() gave, of the same sizes",
                slug="data-state",
            )
        return place.epoch * self.steps_per_epoch + within

    @property
    def owed_max(self) -> int:
        """The most owed positions that a step takes in addition to its own."""
        return owed_per_step(self.global_batch_size)

    def dealt_owed(self, owed: Spans, *, is_further: bool) -> tuple[Spans, Spans]:
        """Return the owed positions that the next step takes, and the remaining ones.

        `is_further`: the step follows the last one of the epoch, and has no positions of its own.
        """
        return split(owed, self.global_batch_size if is_further else self.owed_max)

    def steps_left(self, step: int, owing: Owing) -> int:
        """Return the number of steps from `step` to the end of its epoch, further ones included."""
        own = 0 if owing.is_further else self.steps_per_epoch - step % self.steps_per_epoch
        left = max(0, length_of_spans(owing.spans) - own * self.owed_max)
        return own + ceil_div(left, self.global_batch_size)

    def deal_epoch(
        self,
        step: int,
        rank: int,
        world_size: int,
        micro_batches: int = 1,
        virtual: VirtualDeal = NO_VIRTUAL_SHARDS,
        owing: Owing = NOTHING_OWED,
    ) -> Iterator[LedgerShare]:
        """Yield this rank's shares from a step to the end of its epoch.

        With virtual shards, the shares are those of `deal_shards`, and micro-batches are ignored.
        """
        world, owed, is_further = (rank, world_size), owing.spans, owing.is_further
        end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        for s in range(step, step if is_further else end):
            if virtual.shards:
                yield from self.deal_shards(s, virtual)
                continue
            now, owed = self.dealt_owed(owed, is_further=False)
            low, high = self.span(s)
            yield from self._deal(s, (low, high), now, world, micro_batches)
        while owed:
            now, owed = self.dealt_owed(owed, is_further=True)
            high = self.span(end - 1)[1]
            yield from self._deal(end - 1, (high, high), now, world, micro_batches)

    def _deal(
        self,
        step: int,
        span: tuple[int, int],
        owed: Spans,
        world: tuple[int, int],
        micro_batches: int,
    ) -> Iterator[LedgerShare]:
        """Yield this rank's share of a step, cut into its micro-batches.

        A share is a contiguous part of the step, as even as possible; so is each micro-batch of the
        share. Every rank has all micro-batches, so that all call the same collectives.
        """
        epoch, (low, high) = step // self.steps_per_epoch, span
        first, end = cut(low - length_of_spans(owed), high, *world)
        for micro in range(micro_batches):
            start, stop = cut(first, end, micro, micro_batches)
            yield LedgerShare(
                step, epoch, micro, micro_batches, start, stop, low, high, world[1], owed=owed
            )

    def deal_again(self, step: int, spans: Spans, rank: int, world_size: int) -> LedgerShare:
        """Return this rank's share of the positions that lost members had in a step.

        Its weight is that in a step with only these positions.
        """
        high = self.span(step)[1]
        first, end = cut(high - length_of_spans(spans), high, rank, world_size)
        epoch = step // self.steps_per_epoch
        return LedgerShare(step, epoch, 0, 1, first, end, high, high, world_size, owed=spans)

    def deal_shards(self, step: int, virtual: VirtualDeal) -> Iterator[LedgerShare]:
        """Yield a rank's virtual shards of a step, each as one micro-batch.

        The step is cut into the same parts in every world.
        """
        epoch, (low, high) = step // self.steps_per_epoch, self.span(step)
        shards, first, end = virtual
        for shard in range(first, end):
            start, stop = cut(low, high, shard, shards)
            place = shard - first, end - first
            yield LedgerShare(step, epoch, *place, start, stop, low, high, shards, shard)
