"""The position in an epoch of shards whose lengths are not known before. Pure.

A shard is a part of a dataset that is read from front to back; only its end tells its length. An
epoch's shards are taken up in order by a fixed number of lanes. A lane has one open shard, and gets
the next one of the order once that has ended. Hence the position is the number of shards that were
taken up, and for each lane its open shard and the offset in it.

A step takes its samples in rounds. In each round the open lanes share what the step still needs,
the ranks read, and the sum of their reports says what each lane gave and which shards have ended.
One round is enough unless a shard ends in it. The world only determines which rank reads which part
of a lane. So a step has the same samples in every world.

The module knows nothing of files, processes or torch. How it fails: ConfigurationError for an
impossible state, and for reports that contradict each other, since a shard then differs between two
readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from elastane.data.checks import ceil_div, whole
from elastane.data.ledger import cut
from elastane.errors import ConfigurationError


class OpenShard(NamedTuple):
    """A shard that a lane reads, and how many of its samples were taken."""

    shard: int
    offset: int


class ShardSpan(NamedTuple):
    """Samples [start, stop) of a shard."""

    shard: int
    start: int
    stop: int


ShardSpans: TypeAlias = tuple[ShardSpan, ...]


def length_of(spans: ShardSpans) -> int:
    """Return the number of samples."""
    return sum(stop - start for _, start, stop in spans)


def first_of(spans: ShardSpans, count: int) -> tuple[ShardSpans, ShardSpans]:
    """Return the first `count` samples, or all if there are fewer, and the rest."""
    first: list[ShardSpan] = []
    for number, (shard, start, stop) in enumerate(spans):
        end = min(stop, start + count)
        if start < end:
            first.append(ShardSpan(shard, start, end))
        if end < stop:
            return tuple(first), (ShardSpan(shard, end, stop), *spans[number + 1 :])
        count -= end - start
    return tuple(first), ()


class LaneReading(NamedTuple):
    """One rank's part of one lane in a round: samples [first, stop) of a shard.

    The lane's part of the round begins at `begin`. With `reports` it ends at `stop`. Then this rank
    reports how many samples exist from `begin` to `stop`, and whether one exists at `stop`.
    """

    lane: int
    shard: int
    begin: int
    first: int
    stop: int
    reports: bool


@dataclass(frozen=True)
class Round:
    """The samples of a step from one round of all lanes: lane i gives up to `quotas[i]`."""

    lanes: tuple[OpenShard, ...]
    quotas: tuple[int, ...]

    def readings(self, rank: int, world_size: int) -> Iterator[LaneReading]:
        """Yield what a rank reads, in the order of the lanes.

        Laid end to end, lanes of equal width are cut into `world_size` equal parts, one for each
        rank. The quotas of a round do not count, so a rank reads the same lanes in every round.
        """
        count = len(self.lanes)
        for lane, (opened, quota) in enumerate(zip(self.lanes, self.quotas, strict=True)):
            first, stop = (
                min(max(ceil_div(edge * count * quota, world_size) - lane * quota, 0), quota)
                for edge in (rank, rank + 1)
            )
            last = lane * world_size // count
            if quota:
                last = (lane * quota + quota - 1) * world_size // (count * quota)
            if first < stop or rank == last:
                begin = opened.offset
                own = begin + first, begin + stop
                yield LaneReading(lane, opened.shard, begin, *own, reports=rank == last)

    def spans(self, rank: int, world_size: int, reports: Sequence[int]) -> ShardSpans:
        """Return the samples that a rank had of the round, from the sum of all ranks' reports."""
        taken = reports[:-1:2]
        parts = (
            ShardSpan(each.shard, each.first, min(each.stop, each.begin + taken[each.lane]))
            for each in self.readings(rank, world_size)
        )
        return tuple(part for part in parts if part.start < part.stop)

    @property
    def report_length(self) -> int:
        """The length of a report: two numbers for each lane, and the samples that a rank has."""
        return 2 * len(self.lanes) + 1

    def report(self, found: Mapping[int, tuple[int, bool]], samples: int) -> list[int]:
        """Return the report of a rank, to be added to those of the others.

        `found` has an entry for each lane that this rank reports: how many samples the lane gave,
        and whether its shard has ended. `samples` is the number of the rank's own samples.
        """
        numbers = [0] * self.report_length
        for lane, (taken, ended) in found.items():
            numbers[2 * lane : 2 * lane + 2] = taken, int(ended)
        numbers[-1] = samples
        return numbers


@dataclass(frozen=True)
class ShardLedger:
    """The position in one epoch; equal on all ranks that apply the same reports.

    `order` has the numbers of the shards in the epoch's order. `taken_up` of them are open or have
    ended; `lanes` has the open ones. `samples` counts the samples taken from all shards.
    `continues`: an open shard is known to have another sample, so the next step of this epoch is
    not empty.
    """

    order: Sequence[int]
    taken_up: int
    lanes: tuple[OpenShard, ...]
    samples: int = 0
    continues: bool = False

    @classmethod
    def begin(cls, order: Sequence[int], lanes: int) -> ShardLedger:
        """Return the position at the beginning of an epoch."""
        opened = tuple(OpenShard(shard, 0) for shard in order[:lanes])
        return cls(order, len(opened), opened)

    @property
    def is_complete(self) -> bool:
        """Whether all shards have ended."""
        return not self.lanes

    def round(self, need: int) -> Round:
        """Return the next round of a step that still needs this number of samples."""
        count = len(self.lanes)
        cuts = [cut(0, need, lane, count) for lane in range(count)]
        return Round(self.lanes, tuple(stop - start for start, stop in cuts))

    def after(self, asked: Round, reports: Sequence[int]) -> ShardLedger:
        """Return the position after a round, from the sum of all ranks' reports."""
        taken, ended = reports[:-1:2], reports[1::2]
        if sum(taken) != reports[-1] or not _is_possible(asked, taken, ended):
            raise ConfigurationError(
                f"the ranks have {reports[-1]} samples of a round, and its shards gave "
                f"{', '.join(map(str, taken))}",
                where=f"shards {', '.join(str(each.shard) for each in asked.lanes)}",
                expected="the same samples in the same order each time a shard is opened",
                next_step="make the source repeatable: no draw without a seed, no changing files",
                slug="data-shard",
            )
        lanes, taken_up = [], self.taken_up
        for opened, count, has_ended in zip(asked.lanes, taken, ended, strict=True):
            if not has_ended:
                lanes.append(OpenShard(opened.shard, opened.offset + count))
            elif taken_up < len(self.order):
                lanes.append(OpenShard(self.order[taken_up], 0))
                taken_up += 1
        samples, continues = self.samples + sum(taken), not all(ended)
        return ShardLedger(self.order, taken_up, tuple(lanes), samples, continues)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a few numbers for each lane, however many shards there are."""
        lanes = [list(opened) for opened in self.lanes]
        return {"samples": self.samples, "taken_up": self.taken_up, "lanes": lanes}

    @classmethod
    def from_state(cls, order: Sequence[int], state: Mapping[str, Any]) -> ShardLedger:
        """Return the position of a state."""
        count = len(order)
        lanes = tuple(
            OpenShard(whole("shard", shard, 0, count - 1), whole("offset", offset))
            for shard, offset in state["lanes"]
        )
        taken_up = whole("taken_up", state["taken_up"], len(lanes), count)
        return cls(order, taken_up, lanes, whole("samples", state["samples"]))


def _is_possible(asked: Round, taken: Sequence[int], ended: Sequence[int]) -> bool:
    """Whether each lane gave its quota, or less of a shard that has ended."""
    return all(
        (count == quota or (0 <= count < quota and has_ended)) and has_ended in (0, 1)
        for quota, count, has_ended in zip(asked.quotas, taken, ended, strict=True)
    )
