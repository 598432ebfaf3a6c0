"""Virtual time: a queue of things to do, and nothing happens between two of them.

Two things due at the same instant happen in the order in which they were asked for, so one seed
is one history.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timer:
    """One thing to do later; `cancel` makes it nothing."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Do nothing when the time comes."""
        self._act = None

    def fire(self) -> bool:
        """Do it, unless it was cancelled; return whether it was done."""
        act, self._act = self._act, None
        if act is None:
            return False
        act()
        return True


class VirtualClock:
    """Monotonic seconds from 0 that pass as fast as the events are handled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._asked = 0

    def after(self, delay_s: float, act: Callable[[], None]) -> Timer:
        """Do `act` in `delay_s` seconds of virtual time."""
        assert delay_s >= 0, delay_s
        timer = Timer(act)
        self._asked += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._asked, timer))
        return timer

    def step(self) -> bool:
        """Go to the next thing that is due and do it; False where nothing is."""
        while self._queue:
            self.now_s, _, timer = heapq.heappop(self._queue)
            if timer.fire():
                return True
        return False
