"""Workers that cannot reach one another, while every agent reaches its coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_jobs import HostJob, job_on, let_pass, wait_world
from jobs import Step, newest
from test_hosts_cut import begin
from test_hosts_in_place import in_place_on

from elastane.protocol.limits import LEFT_OUT_FIRST_S
from elastane.protocol.log_events import EventKind


def wait_pair(job: HostJob) -> Step:
    """Wait until the newest world is of `a` and one of the others; of which, their ranks decide."""

    def is_there(seen: list[Step]) -> bool:
        last = newest(seen)
        nodes = {step.node for step in last}
        return len(last) >= 6 and last[0].world == len(nodes) == 2 and "a" in nodes

    return newest(job.wait("a and another train together", is_there))[0]


def test_dead_connections_are_replaced_and_no_worker_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        workers = job.pids("abc")
        job.lan.cut_off("b", "c")
        job.wait_event(EventKind.ROUND_SETTLED, "all workers wait for one another")
        job.lan.heal()
        first = wait_world(job, "abc", (1, 0))
        assert job.pids("abc") == workers, "nobody restarted"
        assert first.restarts == 0
        numbers = [s.step for s in job.seen() if s.node == "a"]
        assert numbers == sorted(set(numbers)), "no step was done twice"


def test_the_job_continues_without_a_node_that_another_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        workers = job.pids("abc")
        job.lan.cut_off("b", "c")
        first = wait_pair(job)
        assert job.pids("abc") < workers, "nobody restarted"
        assert first.restarts == 0
        told = job.wait_event(EventKind.INCIDENT, "the job continues without")
        pairs = "node b does not reach node c at 10.77.0.3", "node c does not reach node b at"
        assert any(pair in told.reason for pair in pairs), told.reason
        assert all(agent.is_alive for agent in job.agents)
        numbers = [s.step for s in job.seen() if s.node == "a"]
        assert numbers == sorted(set(numbers)), "no step was done twice"


@pytest.mark.soak
def test_a_node_that_was_left_out_joins_again_once_the_network_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        job.lan.cut_off("b", "c")
        alone = wait_pair(job)
        job.lan.heal()
        told = job.wait_event(EventKind.NODE_READMITTED)
        assert told.reason.startswith("probes are answered"), told.reason
        wait_world(job, "abc", (alone.round, alone.attempt))


@pytest.mark.soak
def test_a_node_that_is_still_cut_off_stays_out_beyond_its_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_place_on(tmp_path, "elastane", monkeypatch) as job:
        job.lan.cut_off("b", "c")
        alone = wait_pair(job)
        let_pass(LEFT_OUT_FIRST_S + 15)
        assert not job.events(EventKind.NODE_READMITTED)
        assert newest(job.seen())[-1].world == 2, "nobody was stopped for it"
        job.lan.heal()
        wait_world(job, "abc", (alone.round, alone.attempt))


@pytest.mark.soak
def test_workers_that_start_afresh_continue_without_a_cut_off_node_and_admit_it_once_it_is_reached(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc") as job:
        begin(job)
        job.wait_step(world=3, count=200)
        job.lan.cut_off("b", "c")
        alone = wait_pair(job)
        assert alone.restarts == 0
        job.wait_event(EventKind.INCIDENT, "the job continues without")
        job.lan.heal()
        told = job.wait_event(EventKind.NODE_READMITTED)
        assert told.reason.startswith("probes are answered"), told.reason
        assert wait_world(job, "abc", (alone.round, alone.attempt)).restarts == 0
