"""Workers in uninterruptible sleep (state D), which no signal reaches: for how long.

A wedged driver or network file system holds them. Pure but for one read of /proc; it ends nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

SLUG = "worker-unkillable"
# Looks for each bound; torch's agent looks ten times a second.
_LOOKS = 8
_PAUSE_MAX_S = 1.0


class StuckWatch:
    """Tells which processes have been in state D at each look for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.pause_s = min(_PAUSE_MAX_S, limit_s / _LOOKS)
        self._since_s: dict[int, float] = {}

    def look(self, states: Mapping[int, str], now_s: float) -> list[int]:
        """Take in the state of each living process; return those that are given up."""
        since_s = self._since_s
        self._since_s = {
            pid: since_s.get(pid, now_s) for pid, state in states.items() if state == "D"
        }
        return [pid for pid, first_s in self._since_s.items() if now_s - first_s >= self.limit_s]


def states_of(pids: Iterable[int]) -> dict[int, str]:
    """Return the letter of each process's state, of those that there are."""
    found = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        found[pid] = text.rpartition(") ")[2][:1]
    return found
