"""Jobs whose coordinator is elected in a store, and scenarios that hold for every store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jobs import Job, newest, trains_on, until

from elastane.protocol.log_events import EventKind


def elected_job(folder: Path, backend: str, endpoint: str, conf: str = "") -> Job:
    """Return a job of one or two nodes that may restart once."""
    return Job(
        folder,
        nnodes="1:2",
        backend=backend,
        endpoint=endpoint,
        conf=conf,
        options=("--max-restarts", "1"),
    )


def the_coordinator_dies_and_another_takes_over(job: Job) -> None:
    """Kill the host of the coordinator: a node takes the leadership, and training continues."""
    lone = job.start_coordinator()
    job.wait_event(EventKind.COORDINATOR_STARTED)
    job.start("a"), job.start("b")
    job.wait_step(world=2)
    lone.send(signal.SIGKILL)
    job.wait_event(EventKind.ROUND_RESUMED)
    trains_on(job)


def a_store_that_is_away_stops_no_training(
    job: Job, away_s: float, faults: list[tuple[Callable[[], None], Callable[[], None]]]
) -> None:
    """Make the store unreachable by each fault, and check that decisions are made afterwards."""
    job.start("a"), job.start("b")
    job.wait_step(world=2)
    for away, back in faults:
        away()
        gone_s = time.monotonic()
        until(
            lambda since_s=gone_s: time.monotonic() - since_s > away_s, "time passes", 1.5 * away_s
        )
        trains_on(job)
        back()
    trains_on(job)
    killed = newest(job.seen())[-1].pid
    os.kill(killed, signal.SIGKILL)
    again = job.wait_step(world=2, fence=(1, 0))
    assert (again.round, again.attempt, again.restarts) == (1, 1, 1), "decisions are made again"
