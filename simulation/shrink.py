"""Shrinks a failing history: fewer faults, then fewer nodes, as long as it fails alike.

What is left out leaves the plan, and the rest is drawn as before. It ends when nothing can go, or
at its time limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import msgspec

from simulation.history import History, HistoryFailedError
from simulation.setup import Cut, HistorySetup

# The limit of one shrinking, in seconds of real time.
SHRINK_S = 20.0


def shrunk(
    setting: HistorySetup, cut: Cut, failure: HistoryFailedError, limit_s: float = SHRINK_S
) -> HistoryFailedError:
    """Return the failure of the smallest history found that fails as `failure` does."""
    end_s = time.monotonic() + limit_s
    goes_on = True
    while goes_on:
        goes_on = False
        for smaller in _smaller(setting, cut):
            if time.monotonic() > end_s:
                return failure
            found = _failure(setting, smaller)
            if found is not None and _kind(found) == _kind(failure):
                cut, failure, goes_on = smaller, found, True
                break
    return failure


def _smaller(setting: HistorySetup, cut: Cut) -> Iterator[Cut]:
    """Yield what has one fault less, and then fewer nodes."""
    for planned in setting.plan:
        if planned.number not in cut.without:
            yield msgspec.structs.replace(cut, without=(*cut.without, planned.number))
    for nodes in range(1, cut.nodes or len(setting.sizes)):
        yield msgspec.structs.replace(cut, nodes=nodes)


def _failure(setting: HistorySetup, cut: Cut) -> HistoryFailedError | None:
    try:
        History(setting, cut).run()
    except HistoryFailedError as failure:
        return failure
    return None


def _kind(failure: HistoryFailedError) -> str:
    """Return what was broken, without numbers that may differ in a smaller history."""
    return re.sub(r"\d+(\.\d+)?", "N", failure.what)
