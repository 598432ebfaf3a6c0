"""The agent that holds the coordinator dies, leaves or stands still; training goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import Agent, Job


@contextmanager
def two_members_and_a_spare(folder: Path, **more: str) -> Iterator[tuple[Job, Agent]]:
    """A job whose coordinator runs in a spare: two others came while it was not yet ready."""
    with Job(folder, nnodes="1:2", options=("--max-restarts", "0"), **more) as job:
        spare = job.start("spare", "--no-zygote")
        yield job, spare


def others(job: Job, agent: Agent) -> list[Agent]:
    return [a for a in job.agents if a is not agent]


def assert_nothing_restarted(job: Job) -> None:
    assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}


def test_the_host_of_the_endpoint_is_killed_and_the_other_agent_of_that_address_takes_over(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:2", options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host = job.coordinator()
        killed_s = time.time()
        host.send(signal.SIGKILL)
        alone = job.wait_step(world=1)
        survivor = job.coordinator()
        assert survivor is not host and alone.node == survivor.name
        assert alone.restarts == 0 and alone.round == 2, "the round goes on counting"
        assert alone.time_s - killed_s < 15
        survivor.send(signal.SIGTERM)
        assert survivor.wait() == 143


def test_the_holder_of_the_lease_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Job(tmp_path, nnodes="1:2", backend="file", endpoint=store) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host = job.coordinator()
        killed_s = time.time()
        host.send(signal.SIGKILL)
        alone = job.wait_step(world=1, count=1)
        assert alone.node != host.name and (alone.restarts, alone.round) == (0, 2)
        assert alone.time_s - killed_s < 10
