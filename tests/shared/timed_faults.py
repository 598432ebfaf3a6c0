"""Faults that begin and end at the times of a plan."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

# Ends a fault.
End = Callable[[], None]


class TimedFault(Protocol):
    """A fault as far as its times go, in seconds after the plan begins."""

    @property
    def at_s(self) -> float:
        """When it begins."""

    @property
    def for_s(self) -> float:
        """How long it lasts."""


F = TypeVar("F", bound=TimedFault)


def carry_out(
    faults: Iterable[F], begin: Callable[[F], End], others: Iterable[tuple[float, End]] = ()
) -> None:
    """Begin and end each fault in its time, and do the `others` at theirs; return after the last.

    `begin` starts a fault and returns what ends it.
    """
    number = itertools.count()

    def act(fault: F) -> None:
        end = begin(fault)
        heapq.heappush(due, (fault.at_s + fault.for_s, next(number), end))

    due: list[tuple[float, int, End]] = [(at_s, next(number), what) for at_s, what in others]
    due += [(each.at_s, next(number), lambda each=each: act(each)) for each in faults]
    heapq.heapify(due)
    begun_s = time.monotonic()
    while due:
        at_s, _, what = heapq.heappop(due)
        while (left_s := begun_s + at_s - time.monotonic()) > 0:
            time.sleep(left_s)
        what()
