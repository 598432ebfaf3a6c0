"""The process that holds the coordinator dies, leaves or is stopped; training continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import Agent, Job, newest, until

from elastane.protocol.log_events import EventKind

LONG_LEASE = str(Path(__file__).parent / "scripts" / "long_lease.py")
# Only where it is 1 does an agent serve the endpoint.
NO_HOST, HOST = "--rdzv-conf=is_host=0", "--rdzv-conf=is_host=1"


@contextmanager
def led_from_outside(folder: Path, backend: str, *options: str) -> Iterator[tuple[Job, Agent]]:
    """Start a job of two nodes, with its coordinator in a process that is no member."""
    endpoint = str(folder / "store") if backend == "file" else ""
    with Job(
        folder,
        nnodes="1:2",
        backend=backend,
        endpoint=endpoint,
        options=("--max-restarts", "1"),
    ) as job:
        lone = job.start_coordinator()
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start("a", *options), job.start("b", *options)
        job.wait_step(world=2)
        yield job, lone


def assert_trains_on(job: Job) -> None:
    """Assert that both nodes continue in their world, and that a failure still restarts them."""
    steps = newest(job.seen())
    assert {(s.round, s.attempt) for s in steps} == {(1, 0)}, "nothing restarted"
    assert len({s.pid for s in steps}) == 2
    job.wait_step(world=2, count=len(steps) // 2 + 5)
    os.kill(steps[-1].pid, signal.SIGKILL)
    again = job.wait_step(world=2, fence=(1, 0))
    assert (again.round, again.attempt, again.restarts) == (1, 1, 1)


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
        assert alone.time_s - killed_s < 45
        survivor.send(signal.SIGTERM)
        assert survivor.wait() == 143


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        ("elastane", signal.SIGTERM),  # its SIGKILL: the next test's
        ("file", signal.SIGKILL),
        pytest.param("elastane", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param("file", signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_coordinator_that_is_no_member_ends_and_nothing_restarts(
    tmp_path: Path, backend: str, end: signal.Signals
) -> None:
    with led_from_outside(tmp_path, backend) as (job, lone):
        lone.send(end)
        ended_s = time.time()
        resumed = job.wait_event(EventKind.ROUND_RESUMED)
        assert resumed.time_s - ended_s < 45
        assert job.coordinator() is not lone
        assert_trains_on(job)


def test_workers_train_without_an_endpoint_host_until_one_comes_and_a_spare_may_leave(
    tmp_path: Path,
) -> None:
    with led_from_outside(tmp_path, "elastane", NO_HOST) as (job, lone):
        lone.send(signal.SIGKILL)
        job.wait_event(EventKind.COORDINATOR_AWAY, count=2)
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 10)
        spare = job.start("spare", HOST)
        job.wait_event(EventKind.ROUND_RESUMED)
        assert job.coordinator() is spare
        job.wait_event(EventKind.NODE_JOINED, "spare")
        spare.send(signal.SIGTERM)
        assert spare.wait() == 143
        job.wait_event(EventKind.COORDINATOR_AWAY, count=4)
        job.start("other", HOST)
        job.wait_event(EventKind.ROUND_RESUMED, count=2)
        assert_trains_on(job)


def test_after_a_kill_of_the_lease_holder_the_others_do_not_wait_for_its_lease(
    tmp_path: Path,
) -> None:
    with Job(
        tmp_path,
        nnodes="1:2",
        backend="file",
        endpoint=str(tmp_path / "store"),
        options=("--rdzv-conf", "lease_ttl=600"),
        program=(LONG_LEASE,),
    ) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host = job.coordinator()
        host.send(signal.SIGKILL)
        alone = job.wait_step(world=1)
        assert alone.node != host.name and (alone.restarts, alone.round) == (0, 2)


def test_a_lease_holder_stopped_past_its_lease_decides_nothing(
    tmp_path: Path,
) -> None:
    with led_from_outside(tmp_path, "file") as (job, lone):
        lone.send(signal.SIGSTOP)
        job.wait_event(EventKind.ROUND_RESUMED)
        assert job.coordinator() is not lone
        before = len(_told_by(job, lone))
        lone.send(signal.SIGCONT)
        job.wait_event(EventKind.COORDINATOR_STOPPED)
        decisions = {EventKind.ROUND_SETTLED, EventKind.ROUND_RESUMED, EventKind.RESTART}
        assert not {e.kind for e in _told_by(job, lone)[before:]} & decisions
        assert_trains_on(job)


def _told_by(job: Job, agent: Agent) -> list[object]:
    return [e for e in job.events() if e.pid == agent.process.pid]


def test_a_suspended_lease_holder_returns_as_an_arrival(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:2", backend="file", endpoint=str(tmp_path / "store")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host = job.coordinator()
        host.send(signal.SIGSTOP)
        alone = job.wait_step(world=1)
        assert alone.node != host.name
        host.send(signal.SIGCONT)
        both = job.wait_step(world=2, fence=(alone.round, alone.attempt))
        assert both.round == alone.round + 1
        rounds = [s.round for s in sorted(job.seen(), key=lambda s: s.time_s)]
        assert rounds == sorted(rounds), "never two sides training"


def test_a_coordinator_stopped_for_less_than_the_silence_limit_declares_no_departure(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host = job.coordinator()
        host.send(signal.SIGSTOP)
        _let_pass(2.0)  # The limit is 3 s; on a busy host the coordinator continues late.
        host.send(signal.SIGCONT)
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 75)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}
        assert not job.events(EventKind.NODE_DEPARTED)


def test_agents_all_stopped_at_once_continue_without_a_restart(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Job(tmp_path, backend="file", endpoint=store, options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        for agent in job.agents:
            agent.send(signal.SIGSTOP)
        _let_pass(4.0)
        for agent in job.agents:
            agent.send(signal.SIGCONT)
        job.wait_event(EventKind.AUTHORITY_REGAINED)
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 75)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}
        assert not job.events(EventKind.NODE_DEPARTED)


def _let_pass(duration_s: float) -> None:
    """Wait while the tested stop lasts."""
    end_s = time.monotonic() + duration_s
    until(lambda: time.monotonic() >= end_s, "time passes")


def test_a_stopped_endpoint_host_restarts_nothing(tmp_path: Path) -> None:
    with led_from_outside(tmp_path, "elastane", NO_HOST) as (job, lone):
        lone.send(signal.SIGSTOP)
        job.wait_event(EventKind.COORDINATOR_AWAY, "silent", count=2)
        lone.send(signal.SIGCONT)
        job.wait_event(EventKind.COORDINATOR_FOUND, count=4)
        assert_trains_on(job)
