"""A simulated agent's hang monitor: the real judgement, on simulated observations.

Only a world that stands still is observed: observing all others would cost more than the rest of a
history, and find nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from elastane.protocol.hangs import Activity, HangRules, Observation
from elastane.protocol.limits import Timing
from elastane.protocol.model import WaitPoint


class Watched(Protocol):
    """A worker as the hang monitor observes it: see `places.SimulatedWorker`."""

    pid: int
    rank: int
    made: int  # how many steps this process has made


class SimulatedHangMonitor:
    """The hang monitor of one node; `waiting` and `all_wait` go into its heartbeats."""

    def __init__(self) -> None:
        self._watch = HangRules(Timing().hang_floor_s, Timing().abort_limit_s)
        self.waiting: tuple[WaitPoint, ...] = ()
        self.all_wait = False

    def look(self, workers: Iterable[Watched], now_s: float) -> None:
        """Look at the workers that have a place, all of them in a collective that does not end."""
        by_pid = {worker.pid: worker for worker in workers}
        sights = {pid: Observation(1, Activity.BODY, worker.made) for pid, worker in by_pid.items()}
        found = self._watch.look(sights, now_s)
        for pid in found.ask:
            at = WaitPoint(max(0, by_pid[pid].rank), "a collective")
            self._watch.answered(pid, waits=True, at=at, traffic=0)
        self.waiting, self.all_wait = found.waiting, found.stalled

    def world_ended(self) -> None:
        """Begin again, for the workers of another world."""
        self._watch = HangRules(Timing().hang_floor_s, Timing().abort_limit_s)
        self.waiting, self.all_wait = (), False
