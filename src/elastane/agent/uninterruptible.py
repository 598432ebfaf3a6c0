"""How long workers have been in uninterruptible sleep (state D), in which no signal reaches them.

A stuck driver or network file system causes it. Pure apart from the read of /proc; it ends no
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

SLUG = "worker-unkillable"
# How many looks fit into the limit; torch's agent looks ten times a second.
_LOOKS = 8
_PAUSE_MAX_S = 1.0


class StuckWatch:
    """Finds the processes that were in state D at every look for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.pause_s = min(_PAUSE_MAX_S, limit_s / _LOOKS)
        self._since_s: dict[int, float] = {}

    def look(self, states: Mapping[int, str], now_s: float) -> list[int]:
        """Record the state of each living process; return those that are given up."""
        since_s = self._since_s
        self._since_s = {
            pid: since_s.get(pid, now_s) for pid, state in states.items() if state == "D"
        }
        return [pid for pid, first_s in self._since_s.items() if now_s - first_s >= self.limit_s]


def states_of(pids: Iterable[int]) -> dict[int, str]:
    """Return the state letter of each process that exists."""
    found = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        found[pid] = text.rpartition(") ")[2][:1]
    return found
