"""Virtual shards by speed: a slow rank has fewer of them, so that the others wait less for it.

Each rank measures how long one of its shards takes, with the wait for its loader and without the
wait for other ranks. After each window of steps all ranks exchange their medians, and so decide the
same. Another deal pays only if it lasts, since loaders then drop what they have read ahead: it has
to be faster by `GAIN` in two windows in a row.

Pure: it measures no time and knows no group.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

# A shorter time of the slowest rank's shards, as a part of the present one.
GAIN = 0.1
# The steps of the first window. One that is shorter than WINDOW_S is too short to decide, and the
# next one has twice the steps, up to WINDOW_MAX.
WINDOW_FIRST = 16
WINDOW_MAX = 1024
WINDOW_S = 0.5


def fastest_deal(times_s: Sequence[float], shards: int) -> tuple[int, ...]:
    """Return how many of `shards` each rank has, at least 1, so that the slowest is done earliest.

    `times_s` has each rank's time for one shard, above 0.
    """
    assert shards >= len(times_s), (shards, len(times_s))
    counts = [1] * len(times_s)
    # When each rank would be done with one shard more.
    ends = [(2 * time_s, rank) for rank, time_s in enumerate(times_s)]
    heapq.heapify(ends)
    for _ in range(shards - len(times_s)):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, ((counts[rank] + 1) * times_s[rank], rank))
    return tuple(counts)


def lasts_s(counts: Sequence[int], times_s: Sequence[float]) -> float:
    """Return how long the slowest rank computes."""
    return max(count * time_s for count, time_s in zip(counts, times_s, strict=True))


class ShardSpeeds:
    """The measured times of one world's shards. All ranks call the same methods in each step."""

    def __init__(self) -> None:
        self._window = WINDOW_FIRST
        self._own_s: list[float] = []
        # Each rank's time for one shard, in the last two windows.
        self._times_s: list[list[float]] = []

    def measure(self, took_s: float, shards: int) -> bool:
        """Record the time of this rank's shards of a step; return whether the window is over."""
        self._own_s.append(took_s / shards)
        return len(self._own_s) >= self._window

    def pop_median_us(self) -> int:
        """Return this rank's median time for one shard in the window, in us, and begin another."""
        median_s, self._own_s = statistics.median(self._own_s), []
        return max(1, round(median_s * 1e6))

    def decide(self, counts: Sequence[int], medians_us: Sequence[int]) -> tuple[int, ...]:
        """Return the deal of the next window from all ranks' medians; `counts` is the present one.

        Both have one number for each rank.
        """
        times_s = [each / 1e6 for each in medians_us]
        if self._window * lasts_s(counts, times_s) < WINDOW_S and self._window < WINDOW_MAX:
            self._window *= 2
            self._times_s = []
            return tuple(counts)
        self._times_s = [*self._times_s[-1:], times_s]
        mean_s = [statistics.fmean(each) for each in zip(*self._times_s, strict=True)]
        found = fastest_deal(mean_s, sum(counts))
        gains = [
            lasts_s(found, each) <= (1 - GAIN) * lasts_s(counts, each) for each in self._times_s
        ]
        if len(gains) < 2 or not all(gains):
            return tuple(counts)
        self._times_s = []
        return found
