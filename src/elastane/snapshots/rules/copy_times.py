"""When copies of the workers' state were begun and complete: the newest, and how often one is made.

Pure. A snapshot server has one `CopyTimes` for each place that holds its workers' state: its own
memory, the memory of another node, storage. Times are seconds of this host's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import Count
from elastane.protocol.model import Seconds
from elastane.snapshots.rules.slot_table import Name

# The usual time between two copies is the median of this many: one that is late changes nothing.
GAPS_MAX = 9


class CopyTime(msgspec.Struct, frozen=True):
    """One copy of the state of `step`: its save began at `began_s`, and it took `took_s`.

    `every_s` is the usual time between two such saves; None while there was only one.
    """

    step: Count
    began_s: Annotated[float, msgspec.Meta(ge=0.0)]
    took_s: Seconds
    every_s: Seconds | None = None


class CopyTimes:
    """The copies in one place; the caller says which of them are still there."""

    def __init__(self) -> None:
        self._times: dict[Name, tuple[float, float]] = {}
        self._gaps: deque[float] = deque(maxlen=GAPS_MAX)
        self._last_s: float | None = None

    def add(self, name: Name, began_s: float, took_s: float) -> None:
        """Record that a copy is complete."""
        if self._last_s is not None and began_s > self._last_s:
            self._gaps.append(began_s - self._last_s)
        self._last_s = max(began_s, self._last_s or began_s)
        self._times[name] = began_s, took_s

    def newest(self, there: Collection[Name]) -> CopyTime | None:
        """Return the newest copy of those that are `there`; the others are forgotten."""
        self._times = {name: times for name, times in self._times.items() if name in there}
        if not self._times:
            return None
        name = max(self._times)
        began_s, took_s = self._times[name]
        return CopyTime(name.key.step, began_s, took_s, median(self._gaps) if self._gaps else None)
