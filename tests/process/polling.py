"""Waits for a condition with pauses that leave the processors to the awaited work."""

from __future__ import annotations

import time
from collections.abc import Callable

# Nine parts of pause to one of looking, since a look may read the log of a long job.
_PAUSE_PER_LOOK = 9
_PAUSE_MAX_S = 0.1


def look(condition: Callable[[], object], pause_min_s: float) -> float | None:
    """Return None if `condition` holds; else how long to pause before the next look."""
    begun_s = time.thread_time()
    if condition():
        return None
    spent_s = time.thread_time() - begun_s
    return min(max(pause_min_s, _PAUSE_PER_LOOK * spent_s), _PAUSE_MAX_S)
