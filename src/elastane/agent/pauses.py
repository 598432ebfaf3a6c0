"""Reports how long rank 0 of this node saves, evaluates and restores, from its status page.

Rank 0 speaks for the job: it saves in most scripts, and an evaluation or a restore is that of all
workers. Short times are reported together, so that a job that saves often writes few events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastane.agent.worker import LocalWorker
from elastane.protocol.pauses import PAUSE_LASTS_S, PAUSE_LOGGED_S, Pause

_NS = 1e9


@dataclass(slots=True)
class _Counts:
    """The seconds of one worker by kind: reported or not to be, seen, and when they last grew."""

    reported: list[float] = field(default_factory=lambda: [0.0] * len(Pause))
    seen: list[float] = field(default_factory=lambda: [0.0] * len(Pause))
    grew_s: list[float] = field(default_factory=lambda: [0.0] * len(Pause))


class PauseWatch:
    """The pauses of rank 0; `found` receives the kind, the seconds, and when they ended.

    The others are followed too, since one of them may become rank 0.
    """

    def __init__(self, found: Callable[[Pause, float, float], None]) -> None:
        self._found = found
        self._workers: dict[int, _Counts] = {}

    def look(self, members: Iterable[LocalWorker], now_s: float) -> None:
        """Look at the workers of a world, and report the pauses that are over, or last."""
        before, self._workers = self._workers, {}
        for worker in members:
            if worker.process is None:
                continue
            pid = worker.process.pid
            counts = self._workers[pid] = before.get(pid) or _Counts()
            times_ns = worker.page.pauses_ns(time.monotonic_ns())
            for place, time_ns in enumerate(times_ns):
                # A pause ends with its worker.
                seconds = time_ns / _NS if worker.is_alive else counts.seen[place]
                self._look_at(counts, place, seconds, now_s, reports=worker.rank == 0)

    def _look_at(
        self, counts: _Counts, place: int, seconds: float, now_s: float, *, reports: bool
    ) -> None:
        grows = seconds > counts.seen[place]
        if grows:
            counts.seen[place], counts.grew_s[place] = seconds, now_s
        more_s = seconds - counts.reported[place]
        if not reports:
            counts.reported[place] = counts.seen[place]
        elif more_s >= (PAUSE_LASTS_S if grows else PAUSE_LOGGED_S):
            counts.reported[place] = seconds
            self._found(Pause(place + 1), more_s, counts.grew_s[place])
