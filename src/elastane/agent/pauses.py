"""Reports how long rank 0 of this node saves, evaluates and restores, from its status page.

Rank 0 speaks for the job: it saves in most scripts, and an evaluation or a restore is that of all
workers. Short times are reported together, so that a job that saves often writes few events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from elastane.agent.worker import LocalWorker
from elastane.protocol.pauses import PAUSE_LASTS_S, PAUSE_LOGGED_S, Pause

_NS = 1e9


class PauseWatch:
    """The pauses of rank 0; `found` receives the kind, the seconds, and when they ended."""

    def __init__(self, found: Callable[[Pause, float, float], None]) -> None:
        self._found = found
        self._pid = 0
        self._reported = [0.0] * len(Pause)
        self._seen = [0.0] * len(Pause)
        self._moved_s = [0.0] * len(Pause)

    def look(self, members: Iterable[LocalWorker], now_s: float) -> None:
        """Look at the workers of a world, and report the pauses that are over, or last."""
        for worker in members:
            if worker.rank == 0 and worker.process is not None:
                times_ns = worker.page.pauses_ns(time.monotonic_ns())
                self._look_at(worker.process.pid, times_ns, now_s, ended=not worker.is_alive)

    def _look_at(self, pid: int, times_ns: tuple[int, ...], now_s: float, *, ended: bool) -> None:
        if pid != self._pid:
            self._pid = pid
            self._reported, self._seen = [0.0] * len(Pause), [0.0] * len(Pause)
        for place, time_ns in enumerate(times_ns):
            seconds = self._seen[place] if ended else time_ns / _NS  # A pause ends with its worker.
            more_s, moves = seconds - self._reported[place], seconds > self._seen[place]
            if moves:
                self._seen[place], self._moved_s[place] = seconds, now_s
            least_s = PAUSE_LASTS_S if moves else PAUSE_LOGGED_S
            if more_s >= least_s:
                self._reported[place] = seconds
                self._found(Pause(place + 1), more_s, self._moved_s[place])
