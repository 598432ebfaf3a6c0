"""Virtual time: a queue of actions; nothing happens between two of them.

Two actions due at the same instant run in the order in which they were scheduled, so one seed is
one history. Each host has clocks of its own, with any offset and a rate of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timer:
    """One thing to do later; `cancel` makes it nothing."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def cancel(self) -> bool:
        """Do nothing when the time comes; return whether it had not come yet."""
        was_due, self._act = self._act is not None, None
        return was_due

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

    @property
    def goes_on(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._queue)

    def step(self) -> bool:
        """Go to the next thing that is due and do it; False where nothing is."""
        while self._queue:
            self.now_s, _, timer = heapq.heappop(self._queue)
            if timer.fire():
                return True
        return False

    def run_until(self, at_s: float) -> None:
        """Do all that is due up to `at_s`, and go there."""
        while self._queue and self._queue[0][0] <= at_s:
            self.now_s, _, timer = heapq.heappop(self._queue)
            timer.fire()
        self.now_s = max(self.now_s, at_s)


class HostClock:
    """The clocks of one host, as CLOCK_MONOTONIC (`now_s`) and CLOCK_BOOTTIME (`boot_s`) are.

    Nothing that one host says of them means anything to another. While the host is suspended
    the first stands still.
    """

    def __init__(self, clock: VirtualClock, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._clock, self._offset_s, self.rate = clock, offset_s, rate
        self._slept_s = 0.0
        self._asleep_s: float | None = None

    @property
    def boot_s(self) -> float:
        """Seconds of this host, those in which it was suspended among them."""
        return self._offset_s + self._clock.now_s * self.rate

    @property
    def now_s(self) -> float:
        """Seconds of this host in which it was not suspended."""
        at_s = self.boot_s if self._asleep_s is None else self._asleep_s
        return at_s - self._slept_s

    @property
    def slept_s(self) -> float:
        """Seconds in which this host was suspended until it was woken last."""
        return self._slept_s

    def after(self, delay_s: float, act: Callable[[], None]) -> Timer:
        """Do `act` in `delay_s` seconds of this host."""
        return self._clock.after(delay_s / self.rate, act)

    def jump(self, for_s: float) -> None:
        """Go forward at once, as the clocks of a virtual machine do that is moved."""
        self._offset_s += for_s

    def suspend(self) -> None:
        """Stand still."""
        self._asleep_s = self.boot_s

    def wake(self) -> None:
        """Go on."""
        if self._asleep_s is not None:
            self._slept_s += self.boot_s - self._asleep_s
            self._asleep_s = None
