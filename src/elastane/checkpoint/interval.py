"""The best interval between checkpoints: Young's and Daly's formula, from measured costs.

J. W. Young, "A first order approximation to the optimum checkpoint interval" (CACM 1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (FGCS 2006), equation 37.
Pure; it cannot fail.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from elastane.protocol.limits import (
    CHECKPOINT_INTERVAL_MAX_S,
    CHECKPOINT_INTERVAL_MIN_S,
    CHECKPOINT_MTBF_S,
    CHECKPOINT_REST_MAX_S,
    CHECKPOINT_WRITING_SHARE,
)


class Interval(NamedTuple):
    """Seconds from one checkpoint to the next, and the reason in words."""

    seconds: float
    why: str


def mtbf_s(lived_s: float, failures: int) -> float:
    """Estimate the mean time between failures from this experience.

    A prior of one failure in `CHECKPOINT_MTBF_S`, the rate of jobs in general, is included. It
    matters less the longer the job lives.
    """
    return (lived_s + CHECKPOINT_MTBF_S) / (failures + 1)


def interval(cost_s: float, failures: int, lived_s: float, write_s: float = 0.0) -> Interval:
    """Return the interval with the least cost of saving and repeating work together.

    Args:
        cost_s: how long one checkpoint blocks the training, in seconds.
        failures: the number of failures so far.
        lived_s: the time in which they happened, in seconds.
        write_s: how long one checkpoint is written in the background, in seconds. Writing takes at
            most half of the time.

    """
    mtbf = mtbf_s(lived_s, failures)
    best = _daly(max(cost_s, 1e-6), mtbf)
    why = f"a save costs {_spell(cost_s)} of training, and something fails every {_spell(mtbf)}"
    least = max(CHECKPOINT_INTERVAL_MIN_S, 2 * write_s)
    if best < least and least > CHECKPOINT_INTERVAL_MIN_S:
        return Interval(least, f"twice the {_spell(write_s)} that one takes to be written out")
    if best < least:
        return Interval(least, f"{why}; {_spell(least)} is the least")
    most = max(CHECKPOINT_INTERVAL_MAX_S, least)
    if best > most:
        return Interval(most, f"{why}; {_spell(most)} is the most")
    return Interval(best, why)


def rest_s(write_s: float) -> float:
    """Return how long storage rests after a write that took `write_s`, in seconds.

    See docs/decisions/write-throttle.md.
    """
    return min(write_s * (1 / CHECKPOINT_WRITING_SHARE - 1), CHECKPOINT_REST_MAX_S)


def _daly(cost_s: float, mtbf: float) -> float:
    if cost_s >= 2 * mtbf:
        return mtbf
    ratio = cost_s / (2 * mtbf)
    return math.sqrt(2 * cost_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _spell(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1000:.3g} ms"
