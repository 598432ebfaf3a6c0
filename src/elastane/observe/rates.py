"""How fast a job trains, from its view: the step rate now, the usual one, and both over time.

Pure. A time without events is a time without steps: the steps of the next count were made just
before it. After a lower count, such as after a restart, steps are counted from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from statistics import median

import msgspec

from elastane.observe.view import JobView, StepPoint

NOW_S = 25.0
USUAL_S = 3600.0


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Step rate and world size in buckets of equal length; None in a bucket without data."""

    from_s: float
    bucket_s: float
    rate: list[float | None]
    world: list[int | None]


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """Steps per second: now, and the median of the last hour."""

    now: float | None
    usual: float | None


def rates_of(view: JobView, now_s: float) -> StepRates:
    """Return the rate at `now_s` and the usual one."""
    newest = takewhile(lambda point: point.time_s >= now_s - NOW_S, reversed(view.steps))
    recent = [point for point in newest if point.time_s <= now_s]
    now: float | None = None
    if len(recent) > 1:
        made = sum(point.made for point in recent[:-1])
        now = made / (recent[0].time_s - recent[-1].time_s)
    elif view.steps and now_s - view.steps[-1].time_s > NOW_S:
        now = 0.0
    hour = takewhile(lambda point: point.since_s >= now_s - USUAL_S, reversed(view.steps))
    usual = [
        point.made / (point.time_s - point.since_s) for point in hour if point is not view.steps[0]
    ]
    return StepRates(now=now, usual=median(usual) if usual else None)


def series_of(
    view: JobView, from_s: float, to_s: float, buckets: int, known_s: float = math.inf
) -> Series:
    """Return the series from `from_s` to `to_s`; after `known_s`, such as now, nothing is known."""
    bucket_s = max((to_s - from_s) / buckets, 1e-3)
    return Series(
        from_s=from_s,
        bucket_s=bucket_s,
        rate=_rates(view.steps, from_s, bucket_s, buckets),
        world=_worlds(view, from_s, bucket_s, buckets, known_s),
    )


def _rates(
    points: Sequence[StepPoint], from_s: float, bucket_s: float, buckets: int
) -> list[float | None]:
    if not points:
        return [None] * buckets
    made = [0.0] * buckets
    for point in points:
        if not point.made:
            continue
        first = int((point.since_s - from_s) / bucket_s)
        last = int((point.time_s - from_s) / bucket_s)
        if first == last < buckets and point.since_s >= from_s:  # most are of one bucket
            made[first] += point.made
            continue
        rate = point.made / (point.time_s - point.since_s)
        first, last = max(0, first), min(buckets - 1, last)
        for index in range(first, last + 1):
            low_s = from_s + index * bucket_s
            covered_s = min(point.time_s, low_s + bucket_s) - max(point.since_s, low_s)
            made[index] += rate * max(0.0, covered_s)
    begin = (points[0].since_s - from_s) / bucket_s
    end = (points[-1].time_s - from_s) / bucket_s
    return [
        round(steps / bucket_s, 4) if begin - 1 < index <= end - 1 else None
        for index, steps in enumerate(made)
    ]


def _worlds(
    view: JobView, from_s: float, bucket_s: float, buckets: int, known_s: float
) -> list[int | None]:
    """Return the smallest world of each bucket, so that a short loss is seen."""
    until_s = view.end.time_s if view.end else known_s
    sizes: list[int | None] = []
    worlds, index, size = [*view.worlds], 0, None
    for bucket in range(buckets):
        end_s = from_s + (bucket + 1) * bucket_s
        low = size
        while index < len(worlds) and worlds[index].time_s < end_s:
            size = worlds[index].size
            low = size if low is None else min(low, size)
            index += 1
        sizes.append(low if end_s - bucket_s < until_s else None)
    return sizes
