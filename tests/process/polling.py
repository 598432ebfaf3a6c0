"""Waits for a condition with pauses that leave the processors to the awaited work."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

# Nine parts of pause to one of looking, since a look may read the log of a long job.
_PAUSE_PER_LOOK = 9
_PAUSE_MAX_S = 0.1
# After a look that runs a program, such as `kubectl`, which takes 0.2 s of processor time.
_PAUSE_AFTER_PROGRAM_MAX_S = 0.5


def look(condition: Callable[[], object], pause_min_s: float) -> float | None:
    """Return None if `condition` holds; else how long to pause before the next look, in seconds."""
    begun_s, programs_begun_s = time.thread_time(), _programs_s()
    if condition():
        return None
    own_s, programs_s = time.thread_time() - begun_s, _programs_s() - programs_begun_s
    pause_s = min(max(pause_min_s, _PAUSE_PER_LOOK * own_s), _PAUSE_MAX_S)
    return max(pause_s, min(_PAUSE_PER_LOOK * programs_s, _PAUSE_AFTER_PROGRAM_MAX_S))


def _programs_s() -> float:
    """Return the processor time of all programs that this process ran and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
