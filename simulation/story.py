"""What happened, in words and virtual time: the output of a failing seed."""

from __future__ import annotations

from collections import deque

from simulation.clock import VirtualClock

# How many lines are kept; a failure is explained by what came shortly before it.
_LINES_MAX = 400


class Story:
    """The last lines of a simulated history."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._untaken = 0

    def tell(self, text: str) -> None:
        """Add a line."""
        self._lines.append(f"{self._clock.now_s:9.3f}  {text}")
        self._untaken += 1

    def text(self) -> str:
        """Return the lines."""
        return "\n".join(self._lines)

    def take(self) -> list[str]:
        """Return the lines since the last take."""
        count, self._untaken = min(self._untaken, len(self._lines)), 0
        return [*self._lines][len(self._lines) - count :]
