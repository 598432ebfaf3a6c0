"""From the command to the first training step, and the start of an elastic job with one node."""

from __future__ import annotations

import time

from bench.harness import NO_LAUNCHER, START_CAP_S, BenchJob, Launcher, Node, Sample, wait_until
from bench.recovery import node_flags, standalone_flags

WORKERS = 2


def first_step(launcher: Launcher) -> Sample:
    """Measure one node with two workers from the command to the first step of any rank."""
    with BenchJob(launcher) as job:
        at = time.monotonic()
        if launcher is NO_LAUNCHER:
            start_by_hand(job)
        else:
            job.start(Node("a"), standalone_flags(WORKERS))
        return until_first_step(job, at)


def start_by_hand(job: BenchJob) -> None:
    """Start the workers as a person would without a launcher, with the environment they need."""
    for rank in range(WORKERS):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "MASTER_PORT": job.port}
        named = {name: str(value) for name, value in env.items()}
        job.start(Node("a"), [], {**named, "MASTER_ADDR": "127.0.0.1"})


def elastic_start(launcher: Launcher) -> Sample:
    """Measure the start of a job of one to two nodes while only one exists."""
    with BenchJob(launcher) as job:
        at = time.monotonic()
        node = Node("a")
        job.start(node, node_flags(job, node, "1:2", WORKERS))
        return until_first_step(job, at)


def until_first_step(job: BenchJob, at: float) -> Sample:
    if not wait_until(lambda: bool(job.steps()), START_CAP_S):
        return Sample(None)
    return Sample(job.steps()[0].at - at)
