"""Hosts that lose power, and hosts that return under an old name or at an old address."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from etcd_server import need_etcd
from host_jobs import EtcdHosts, HostJob, job_on, judge, wait_world
from hosts import Lan, need_hosts
from jobs import newest, ranks

from elastane.protocol.log_events import EventKind

# Silence 3 s, a lease 2 s, the wait for the last world's agents 2 s, and an election among etcd's
# members; the rest is room for a busy machine.
BOUND_S = 30.0


@pytest.mark.soak
def test_the_host_of_rank_0_loses_its_power_and_returns_under_its_name_and_at_another_address(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc") as job:
        job.at("c")
        job.start("c", "--node-rank", "2")
        job.start("a", "--node-rank", "0"), job.start("b", "--node-rank", "1")
        wait_world(job, "abc")
        victim = ranks(newest(job.seen()))[0]
        assert victim == "a" and job.coordinator().name == "c"
        job.lan.kill("a")
        killed_s = time.time()
        first = wait_world(job, "bc", (1, 0))
        assert first.time_s - killed_s < BOUND_S and first.restarts == 0
        assert "silent" in job.wait_event(EventKind.NODE_DEPARTED, "a").reason
        job.lan.add("a", number=9)
        assert job.lan.address("a") == "10.77.0.9"
        job.start("a")
        wait_world(job, "abc", (first.round, first.attempt))
        joined = [e for e in job.events(EventKind.NODE_JOINED) if e.node == "a"]
        assert [e.reason.split(",")[0] for e in joined] == [*("from 10.77.0.1", "from 10.77.0.9")]


@pytest.mark.soak
def test_a_host_that_loses_its_power_and_is_started_again_at_once_resets_its_old_session(
    tmp_path: Path,
) -> None:
    # Silence alone would end the session after a minute.
    with job_on(tmp_path, "ab", conf="last_call=0.5,silence=60") as job:
        job.start("a"), job.start("b")
        first = wait_world(job, "ab")
        job.lan.kill("b")
        job.lan.add("b")
        job.start("b")
        wait_world(job, "ab", (first.round, first.attempt))
        assert "reset" in job.wait_event(EventKind.NODE_DEPARTED, "b").reason


@pytest.mark.soak
def test_the_host_of_the_endpoint_loses_its_power_and_one_of_another_name_at_its_address_serves(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc") as job:
        job.start_all("abc")
        wait_world(job, "abc")
        job.lan.kill("a")
        job.wait_event(EventKind.COORDINATOR_AWAY, "b")
        job.wait_event(EventKind.COORDINATOR_AWAY, "c")
        steps = len(job.seen())
        assert all(step.round == 1 for step in job.seen())
        job.lan.add("d", number=1)
        job.start("d")
        came_s = time.time()
        first = wait_world(job, "bcd", (1, 0))
        # With the newcomer at once where it was warm by then, else in the world after that.
        assert first.time_s - came_s < BOUND_S and first.round in (2, 3)
        later = [step for step in job.seen()[steps:] if step.round == 1]
        assert not later, "the others trained on without the host"
        assert job.coordinator().name == "d"


@pytest.mark.soak
def test_after_a_power_loss_of_the_elected_coordinator_the_others_continue(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc", backend="file") as job:
        job.start("a")
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start_all("bc")
        wait_world(job, "abc")
        job.lan.kill("a")
        killed_s = time.time()
        first = wait_world(job, "bc", (1, 0))
        assert first.time_s - killed_s < BOUND_S
        job.lan.add("a")
        job.start("a")
        wait_world(job, "abc", (first.round, first.attempt))


@pytest.mark.soak
def test_the_host_of_a_coordinator_that_is_no_member_loses_its_power_and_nothing_restarts(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abl", backend="file", nnodes="2") as job:
        job.start_coordinator("l")
        job.wait_event(EventKind.COORDINATOR_STARTED)
        job.start_all("ab")
        wait_world(job, "ab")
        job.lan.kill("l")
        job.wait_event(EventKind.ROUND_RESUMED)
        # No agent hung on a call to the host that is gone until its successor had given up.
        waits = [e.reason for e in job.events(EventKind.WAITING)]
        assert not [reason for reason in waits if "can be reached" in reason]
        job.wait_step(world=2, count=len(newest(job.seen())) // 2 + 20)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}


@pytest.mark.soak
def test_after_a_power_loss_of_etcds_leader_and_an_agent_the_majority_continues(
    tmp_path: Path,
) -> None:
    need_hosts()
    need_etcd()
    with Lan("abc") as lan:
        etcd = EtcdHosts(lan, "abc", tmp_path / "etcd").start()
        job = HostJob(tmp_path, "2:3", backend="etcd", endpoint=etcd.endpoint, lan=lan)
        with job:
            leader = etcd.leader()
            # The coordinator too is there: the worst host to lose.
            job.start(leader)
            job.wait_event(EventKind.COORDINATOR_STARTED)
            others = "abc".replace(leader, "")
            job.start_all(others)
            wait_world(job, "abc")
            lan.kill(leader)
            killed_s = time.time()
            first = wait_world(job, others, (1, 0))
            assert first.time_s - killed_s < BOUND_S
            assert etcd.leader() in others
            lan.add(leader)
            etcd.start(leader)
            job.start(leader)
            wait_world(job, "abc", (first.round, first.attempt))
            judge(job)


@pytest.mark.soak
def test_every_host_in_turn_loses_its_power_with_its_etcd_and_comes_back(tmp_path: Path) -> None:
    need_hosts()
    need_etcd()
    with Lan("abc") as lan:
        etcd = EtcdHosts(lan, "abc", tmp_path / "etcd").start()
        with HostJob(tmp_path, "2:3", backend="etcd", endpoint=etcd.endpoint, lan=lan) as job:
            job.start_all("abc")
            fence = wait_world(job, "abc")
            for victim in "abcabc":
                lan.kill(victim)
                first = wait_world(job, "abc".replace(victim, ""), (fence.round, fence.attempt))
                lan.add(victim)
                etcd.start(victim)
                job.start(victim)
                fence = wait_world(job, "abc", (first.round, first.attempt))
            judge(job)
