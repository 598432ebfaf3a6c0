"""The coordinator's time: monotonic seconds that stand still while its process does.

A host that was stopped, starved or waiting for a slow store has heard nobody meanwhile: what its
agents said is still in the kernel's buffers, and must not be judged as silence (measured: a stop
of 2.7 s made a coordinator bury its own agent and restart a healthy job). Bounds come later by
the time that was lost, which is the safe side of each. It knows nothing of what is timed by it.
"""

from __future__ import annotations

import time

# Whoever reads the clock does so at least this often, ...
READ_S = 0.5
# ... and what passed between two readings counts for no more than this.
STEP_MAX_S = 0.75


class SteadyClock:
    """A monotonic clock that is to be read each READ_S."""

    def __init__(self) -> None:
        self._real_s = self._now_s = time.monotonic()

    def read_s(self) -> float:
        """Return the time now, in seconds; never above `time.monotonic()`."""
        real_s = time.monotonic()
        self._now_s += min(real_s - self._real_s, STEP_MAX_S)
        self._real_s = real_s
        return self._now_s
