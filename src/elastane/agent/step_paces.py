"""The step times of the local workers: the agent's side of `protocol.stragglers`.

Reads the step times on their status pages, and from /proc for how long their main threads ran or
had no processor. A worker that shows too few steps has no pace, and then none is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from elastane.agent.worker import LocalWorker
from elastane.process.status_page import StatusPage
from elastane.protocol.stragglers import PACES_MAX, WINDOW_STEPS, Pace, StepTimes, pace_of

_NS = 1e9


class StepPaces:
    """The paces of the workers of one node."""

    def __init__(self) -> None:
        # By process: step count, and nanoseconds for which its main thread ran and was queued.
        self._samples: dict[int, deque[tuple[int, int, int]]] = {}

    def look(self, members: Iterable[LocalWorker]) -> tuple[Pace, ...]:
        """Return a pace of each member; none if one of them has none."""
        before, self._samples = self._samples, {}
        paces = []
        for worker in members:
            if worker.process is None or not worker.is_alive:
                continue
            pid = worker.process.pid
            samples = self._samples[pid] = before.get(pid) or deque()
            pace = _pace(worker.rank, pid, worker.page, samples)
            if pace is not None:
                paces.append(pace)
        is_whole = len(paces) == len(self._samples) <= PACES_MAX
        return tuple(paces) if is_whole else ()


def _pace(
    rank: int, pid: int, page: StatusPage, samples: deque[tuple[int, int, int]]
) -> Pace | None:
    steps = page.steps_timed
    if not samples or samples[-1][0] != steps:
        samples.append((steps, *_processor_ns(pid)))
    # The newest sample from before the window, and all in it.
    while len(samples) > 2 and samples[1][0] <= steps - WINDOW_STEPS:
        samples.popleft()
    times = [
        StepTimes(whole / _NS, waits / _NS, loads / _NS)
        for whole, waits, loads in page.step_times(WINDOW_STEPS)
    ]
    if len(times) < WINDOW_STEPS:
        return None
    (first, ran_ns, queued_ns), (last, runs_ns, queues_ns) = samples[0], samples[-1]
    made = max(1, last - first)
    return pace_of(
        rank,
        steps,
        times,
        max(0, runs_ns - ran_ns) / _NS / made,
        max(0, queues_ns - queued_ns) / _NS / made,
    )


def _processor_ns(pid: int) -> tuple[int, int]:
    """Return for how long the main thread ran, and could have run and had no processor."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
        return int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return 0, 0  # it has ended, or this kernel does not count
