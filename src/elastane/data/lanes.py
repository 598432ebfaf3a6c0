"""Where the positions of an epoch lie in files that are read from start to end. Pure.

An epoch's stream is all its shards, in the epoch's order. It is cut into L lanes, equal runs (to
one sample) that are read side by side: position p is sample p // L of lane p % L. A step's
positions, ordered by lane, are dealt to the ranks. Hence a rank reads the same lanes in every step,
from start to end, while the world is the same. The committed samples determine how far each lane
has been read, so the position stays one integer.

It knows nothing of files, ranks or torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["LaneRun", "Lanes"]


class LaneRun(NamedTuple):
    """Consecutive samples of one shard: [start, stop) of shard number `shard`, for one lane."""

    lane: int
    shard: int
    start: int
    stop: int


class Lanes:
    """The map of one epoch. `order` are the shards' numbers in order, `lengths` their lengths."""

    def __init__(self, order: Sequence[int], lengths: Sequence[int], lanes: int) -> None:
        self.lanes = lanes
        self._order = order
        self._begins = [0, *accumulate(lengths[shard] for shard in order)]
        self._lane_begins = [
            0, *accumulate(self._before(lane, self._begins[-1]) for lane in range(lanes))
        ]  # fmt: skip

    def _before(self, lane: int, position: int) -> int:
        """Return how many positions below this one belong to the lane."""
        return (position - lane + self.lanes - 1) // self.lanes

    def runs(self, batch: tuple[int, int], share: tuple[int, int]) -> Iterator[LaneRun]:
        """Yield the runs that a share of a batch (both as positions) reads, in order.

        A share's positions count along the batch ordered by lane, so that shares that partition the
        batch read each of its samples once.
        """
        low, high = batch
        slot = low
        for lane in range(self.lanes):
            first, end = self._before(lane, low), self._before(lane, high)
            begin = max(share[0] - slot, 0)
            stop = min(share[1] - slot, end - first)
            if begin < stop:
                yield from self._in_shards(lane, first + begin, first + stop)
            slot += end - first

    def _in_shards(self, lane: int, first: int, end: int) -> Iterator[LaneRun]:
        here, stop = self._lane_begins[lane] + first, self._lane_begins[lane] + end
        at = bisect_right(self._begins, here) - 1
        while here < stop:
            begins, ends = self._begins[at : at + 2]
            until = min(stop, ends)
            if here < until:
                yield LaneRun(lane, self._order[at], here - begins, until - begins)
            here, at = until, at + 1
