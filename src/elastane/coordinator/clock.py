"""The coordinator's time: monotonic seconds that stand still while its process does.

A host that was stopped, starved or blocked on a slow store has received nothing meanwhile. Messages
of its agents are still in the kernel's buffers and must not count as silence. (Measured: a stop of
2.7 s made a coordinator declare its own agent departed and restart a healthy job.) Every deadline
moves by the lost time, which is the safe side of each.
"""

from __future__ import annotations

import time

# The clock has to be read at least this often, ...
READ_S = 0.5
# ... and time between two readings counts for no more than this.
STEP_MAX_S = 0.75


class SteadyClock:
    """A monotonic clock that has to be read every READ_S."""

    def __init__(self) -> None:
        self._real_s = self._now_s = time.monotonic()

    def read_s(self) -> float:
        """Return the time now, in seconds; never above `time.monotonic()`."""
        real_s = time.monotonic()
        self._now_s += min(real_s - self._real_s, STEP_MAX_S)
        self._real_s = real_s
        return self._now_s
