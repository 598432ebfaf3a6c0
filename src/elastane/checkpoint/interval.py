"""How often a checkpoint pays: Young's and Daly's interval, from what was measured.

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
    """Seconds from one checkpoint to the next, and why so many, in words."""

    seconds: float
    why: str


def mtbf_s(lived_s: float, failures: int) -> float:
    """Return the mean time between failures that so much experience speaks for.

    Before the first failure it is what jobs in general have: that counts as one failure within
    `CHECKPOINT_MTBF_S`, which experience outweighs the longer it lasts.
    """
    return (lived_s + CHECKPOINT_MTBF_S) / (failures + 1)


def interval(cost_s: float, failures: int, lived_s: float, write_s: float = 0.0) -> Interval:
    """Return the interval at which saving and redoing together cost least.

    Args:
        cost_s: what one checkpoint costs the training, in seconds.
        failures: how often something has failed, ...
        lived_s: ... in so many seconds.
        write_s: how long a checkpoint takes to be written out behind the training; half of the
            time at most is spent on that.

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
    """Return how long storage rests that has written for so many seconds, before it gets a save.

    That is where saves are due more often than it takes them; they stay in memory meanwhile.
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
