"""Nodes that die, hang or leave: which others continue or wait, and after how long."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from jobs import Agent, Job, left_over, newest, ranks, runs, until

from elastane.protocol.log_events import EventKind


def host_and_guest(job: Job) -> tuple[Agent, Agent]:
    """Return the agent with the coordinator, and another agent."""
    host = job.coordinator()
    return host, next(agent for agent in job.agents if agent is not host)


def test_a_killed_node_loses_its_workers_and_the_survivor_continues_without_a_charge(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:2", options=("--max-restarts", "0"), steps=400) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host, guest = host_and_guest(job)
        victims = [s.pid for s in newest(job.seen()) if s.node == guest.name]
        guest.send(signal.SIGKILL)
        until(lambda: not any(map(runs, victims)), "workers die")
        alone = job.wait_step(world=1)
        assert (alone.node, alone.restarts, alone.round) == (host.name, 0, 2)
        assert host.wait() == 0
        assert not job.events(EventKind.RESTART)


def test_a_fixed_job_waits_for_a_replacement_which_takes_the_place_and_the_rank(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        before = ranks([job.wait_step(world=2), *newest(job.seen())])
        _, guest = host_and_guest(job)
        guest.send(signal.SIGKILL)
        job.wait_event(EventKind.WAITING, "1 of at least 2 nodes are here", count=2)
        job.start(guest.name)
        fence = job.wait_step(world=2, fence=(1, 0))
        assert (fence.round, fence.restarts) == (2, 0)
        assert ranks(newest(job.seen())) == before


def test_a_fixed_job_whose_replacement_does_not_come_ends_with_75_and_says_what_it_waited_for(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, mode="alone", conf="join_timeout=6") as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host, guest = host_and_guest(job)
        guest.send(signal.SIGKILL)
        assert host.wait() == 75
        assert "1 of at least 2 nodes" in host.box and "6 s" in host.box, host.box
        assert host.name in host.box and "next" in host.box


def test_a_node_that_is_killed_and_started_again_at_once_takes_its_own_place_in_one_round(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:3", mode="alone", options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b"), job.start("c")
        job.wait_step(world=3)
        before, begun = ranks(newest(job.seen())), newest(job.seen())[-1]
        # The first rank that is not the coordinator's: arrivals get higher ranks.
        guests = {agent.name: agent for agent in job.agents if agent is not job.coordinator()}
        guest = next(guests[before[rank]] for rank in sorted(before) if before[rank] in guests)
        guest.send(signal.SIGSTOP)  # Its session lives: the newcomer meets its ghost.
        job.start(guest.name)
        assert job.wait_event(EventKind.NODE_JOINED, guest.name, count=2)
        guest.send(signal.SIGKILL)
        fence = job.wait_step(world=3, fence=(begun.round, begun.attempt))
        assert ranks(newest(job.seen())) == before
        assert (fence.round, fence.restarts) == (begun.round + 1, 0)


def test_a_fixed_job_with_a_spare_continues_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, mode="alone", options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host, guest = host_and_guest(job)
        job.start("spare")
        job.wait_event(EventKind.NODE_JOINED, "spare")
        guest.send(signal.SIGKILL)
        job.wait_step(world=2, fence=(1, 0))
        assert set(ranks(newest(job.seen())).values()) == {host.name, "spare"}


def test_agents_that_wait_for_others_end_at_once_on_sigterm(tmp_path: Path) -> None:
    with Job(tmp_path, mode="alone", nnodes="3") as job:
        job.start("a"), job.start("b")
        job.wait_event(EventKind.WAITING, "2 of at least 3 nodes")
        host, guest = host_and_guest(job)
        for agent in (guest, host):
            agent.send(signal.SIGTERM)
            assert agent.wait() == 143
            assert not agent.box


def test_all_agents_may_get_sigterm_at_once_and_the_checkpoint_is_of_the_last_step(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:2", mode="drain") as job:
        a, b = job.start("a"), job.start("b")
        job.wait_step(world=2, count=13)
        a.send(signal.SIGTERM), b.send(signal.SIGTERM)
        assert (a.wait(), b.wait()) == (143, 143)
        done = [s.step for s in job.seen() if s.rank == 0]
        assert done == list(range(1, len(done) + 1))
        assert int((job.folder / "steps.ck").read_text()) == done[-1]


@pytest.mark.parametrize(
    ("who", "mode"),
    [
        ("guest", "drain"),
        ("host", "term"),
        pytest.param("guest", "term", marks=pytest.mark.soak),
        pytest.param("host", "drain", marks=pytest.mark.soak),
    ],
)
def test_a_node_leaving_on_sigterm_loses_and_repeats_no_step(
    tmp_path: Path, mode: str, who: str
) -> None:
    with Job(tmp_path, nnodes="1:2", mode=mode, options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2, count=13)  # Not where the script checkpoints by itself.
        host, guest = host_and_guest(job)
        leaves, stays = (guest, host) if who == "guest" else (host, guest)
        leaves.send(signal.SIGTERM)
        assert leaves.wait() == 143
        assert not leaves.box
        alone = job.wait_step(world=1)
        assert (alone.node, alone.restarts) == (stays.name, 0)
        done = Counter(s.step for s in job.seen() if s.rank == 0)
        assert set(done.values()) == {1}, "no step is done twice"
        assert sorted(done) == list(range(1, max(done) + 1)), "no step is lost"
        stays.send(signal.SIGTERM)
        assert stays.wait() == 143


def test_a_stopped_agent_departs_by_silence_and_returns_as_an_arrival(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, nnodes="1:2", options=("--max-restarts", "0")) as job:
        job.start("a"), job.start("b")
        job.wait_step(world=2)
        host, guest = host_and_guest(job)
        old = {s.pid for s in newest(job.seen()) if s.node == guest.name}
        guest.send(signal.SIGSTOP)
        stopped_s = time.time()
        alone = job.wait_step(world=1)
        assert alone.node == host.name
        assert alone.time_s - stopped_s < 30.0, "by silence, not by the collective's timeout"
        assert "silent" in job.wait_event(EventKind.NODE_DEPARTED, guest.name).reason
        guest.send(signal.SIGCONT)
        both = job.wait_step(world=2, fence=(alone.round, alone.attempt))
        assert both.round == alone.round + 1
        assert ranks(newest(job.seen())) == {0: host.name, 1: guest.name}
        assert not any(map(runs, old)), "stale workers are gone"
        _assert_one_world_at_a_time(job)


def _assert_one_world_at_a_time(job: Job) -> None:
    """Assert that no step of a round comes after a step of a later round."""
    ordered = sorted(job.seen(), key=lambda s: s.time_s)
    rounds = [s.round for s in ordered]
    assert rounds == sorted(rounds)


def test_a_killed_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    with Job(tmp_path, nnodes="1:2") as job:
        agent = job.start("a")
        job.wait_step(world=1)
        agent.send(signal.SIGKILL)
        agent.wait()
        until(
            lambda: not left_over(job.mark),
            "workers, zygote, store process and orphan reaper end",
        )
