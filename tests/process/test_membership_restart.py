"""Failed workers restart the group, on one budget for the whole job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jobs import Job, newest, ranks

from elastane.protocol.log_events import EventKind


def test_failures_restart_the_group_are_counted_once_for_the_job_and_end_all_agents_with_the_cause(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, options=("--max-restarts", "2")) as job:
        a, b = job.start("a"), job.start("b")
        job.wait_step(world=2)
        for restarts in (0, 1, 2):
            fence = job.wait_step(world=2, fence=(1, restarts - 1))
            assert (fence.round, fence.attempt, fence.restarts) == (1, restarts, restarts)
            group = newest(job.seen())
            assert {s.restarts for s in group} == {restarts}, "the same count on all workers"
            pids = {s.rank: s.pid for s in group}
            group_node = ranks(group)[1]
            # The second time both at once: that is one restart.
            victims = pids.values() if restarts == 1 else [pids[1]]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        assert (a.wait(), b.wait()) == (1, 1)
        for agent in (a, b):
            cause = f"worker of rank 1 (local rank 0, pid {pids[1]}) on node {group_node} ended"
            assert f"root cause {cause} with SIGKILL" in agent.box, "on every node"
        assert len(job.events(EventKind.RESTART)) == 2


def test_all_agents_end_with_0_when_all_workers_did(tmp_path: Path) -> None:
    with Job(tmp_path, mode="alone", steps=5) as job:
        a, b = job.start("a"), job.start("b", nproc=2)
        assert (a.wait(), b.wait()) == (0, 0)
        seen = job.seen()
        assert {s.rank for s in seen} == {0, 1, 2} and {s.world for s in seen} == {3}
