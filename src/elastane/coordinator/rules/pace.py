"""How quickly a node makes steps, from what its heartbeats say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# A rate is of the latest so many changes of the count: with a heartbeat a second, of half a minute.
_SAMPLES_MAX = 32


@dataclass(slots=True)
class StepPace:
    """The latest step counts of one node, each with the time at which it was first heard."""

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))

    def note(self, now_s: float, steps: int | None) -> None:
        """Take in a step count; None, or a smaller one, begins another count."""
        last = self._samples[-1][1] if self._samples else None
        if steps is None or (last is not None and steps < last):
            self._samples.clear()
        if steps is not None and (not self._samples or steps > self._samples[-1][1]):
            self._samples.append((now_s, steps))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate up to now; None while too little is known."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A node that stands still slows down: what it does not say counts, once that is overdue.
        overdue_s = now_s - last_s > 2 * (last_s - first_s) / (len(self._samples) - 1)
        return (last - first) / ((now_s if overdue_s else last_s) - first_s)
