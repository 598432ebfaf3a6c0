"""Packets that come late, doubled, reordered, slowly or not at all, and all of it at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from host_jobs import HostJob, job_on, let_pass, wait_world
from jobs import newest

from elastane.protocol.log_events import EventKind

FAULTS = {
    "late": {"delay_s": 0.05},
    "lost": {"loss": 0.05},
    "twice": {"duplicate": 0.3},
    "in another order": {"jitter_s": 0.02},
    "slow": {"bytes_per_s": 100_000.0},
}


def decisions_are_made(job: HostJob) -> None:
    """Kill a worker; assert that its world restarts once, in the same round."""
    before = newest(job.seen())[-1]
    job.lan[before.node].ask("signal", pid=before.pid, number=int(signal.SIGKILL))
    again = wait_world(job, "abc", (before.round, before.attempt))
    assert (again.round, again.restarts) == (before.round, before.restarts + 1)
    assert not job.events(EventKind.NODE_DEPARTED), "nobody was given up"


@pytest.mark.soak
def test_late_lost_doubled_reordered_and_slow_packets_only_cost_time(
    tmp_path: Path,
) -> None:
    with job_on(tmp_path, "abc", nnodes="3", options=("--max-restarts", "1")) as job:
        rule = {"delay_s": 0.01, "jitter_s": 0.01, "loss": 0.01, "duplicate": 0.1}
        job.lan.all_ways("abc", **rule, bytes_per_s=500_000.0)
        job.start_all("abc")
        wait_world(job, "abc")
        decisions_are_made(job)
        counts = job.lan.heal()
        assert counts["lost"] and counts["repeated"] and counts["held"], counts


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_with_one_fault_only_costs_time(tmp_path: Path, fault: str) -> None:
    with job_on(tmp_path, "abc", nnodes="3", options=("--max-restarts", "3")) as job:
        job.lan.all_ways("abc", **FAULTS[fault])
        job.start_all("abc")
        wait_world(job, "abc")
        for _ in range(3):
            decisions_are_made(job)
        let_pass(5.0)
        counts = job.lan.heal()
        assert any(counts.get(what) for what in ("lost", "repeated", "held")), counts


@pytest.mark.soak
def test_a_link_that_flaps_faster_than_silence_departs_no_node(tmp_path: Path) -> None:
    with job_on(tmp_path, "abc", nnodes="3", options=("--max-restarts", "0")) as job:
        job.start_all("abc")
        wait_world(job, "abc")
        for _ in range(6):
            job.lan.cut_off("b")
            let_pass(1.0)
            job.lan.heal()
            let_pass(2.0)
        assert not job.events(EventKind.NODE_DEPARTED)
        job.wait_step(world=3, count=len(newest(job.seen())) // 3 + 10)
        assert {(s.round, s.attempt) for s in job.seen()} == {(1, 0)}
