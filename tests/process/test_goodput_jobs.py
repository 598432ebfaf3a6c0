"""The goodput account of real jobs with kills names the incident of each lost second."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import PRELOAD_OPTIMIZER
from test_recovery_in_place import InPlace, starts

from elastane.observe.account import TimeCause, account_of
from elastane.testing import LocalCluster

PAUSES = Path(__file__).parent / "scripts" / "saves_and_evaluates.py"
PAUSE_S = 2.0  # for which the script saves, restores and evaluates

COUNTED = """
import sys, time
from pathlib import Path
import elastane
time.sleep(0.3)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
    elastane.should_checkpoint()
"""


def test_kills_in_place_are_accounted_by_the_milliseconds_that_they_cost(tmp_path: Path):
    job = InPlace(tmp_path)
    with job.cluster:
        began_s = time.time()
        nodes = starts(job, "ab")
        for node in nodes:
            node.kill_worker()
            job.wait_steps(20, 2)
        job.ends_exact()
        wall_s = time.time() - began_s
        account = account_of(job.cluster.events())
    assert account is not None
    causes = account.causes()
    total_s = sum(found.seconds for found in causes.values())
    assert total_s == pytest.approx(account.wall_s, rel=0.01)
    assert account.wall_s <= wall_s, "the job is younger than its first agent"
    for cause in (TimeCause.DETECTING, TimeCause.REBUILDING, TimeCause.RETRIED):
        assert {1, 2} <= causes[cause].incidents.keys(), cause
        assert sum(causes[cause].incidents.values()) == pytest.approx(causes[cause].seconds)
    begun = [one for one in account.intervals if one.cause is TimeCause.PRODUCTIVE]
    assert len(begun) >= 3, "training continues after each fault"
    assert TimeCause.UNKNOWN not in causes and TimeCause.WAITING not in causes


def test_a_script_that_knows_nothing_of_elastane_saves_restores_and_evaluates(tmp_path: Path):
    cluster = LocalCluster(
        [PAUSES, str(tmp_path / "state.pt"), str(PAUSE_S)],
        folder=tmp_path / "c", nnodes=1, nproc_per_node=2, preload=PRELOAD_OPTIMIZER,
    )  # fmt: skip
    with cluster:
        cluster.start("a")
        cluster.wait_done()
        account = account_of(cluster.events())
    assert account is not None
    seconds = {cause: found.seconds for cause, found in account.causes().items()}
    for cause, times in (("saving", 2), ("restoring", 1), ("evaluating", 1)):
        found_s = seconds.get(TimeCause(cause), 0.0)
        assert (times - 0.5) * PAUSE_S < found_s < (times + 1) * PAUSE_S, seconds
    assert sum(seconds.values()) == pytest.approx(account.wall_s)


def test_a_restart_is_lost_time_from_the_kill_to_the_first_step(tmp_path: Path):
    script, enough = tmp_path / "counted.py", tmp_path / "enough"
    script.write_text(COUNTED)
    cluster = LocalCluster(
        [script, str(enough)], folder=tmp_path / "c", nnodes=1, nproc_per_node=2, max_restarts=1
    )
    with cluster:
        node = cluster.start("a")
        cluster.wait_event("workers-training")
        killed_s = time.time()
        os.kill(node.workers()[0], signal.SIGKILL)
        noticed_s = cluster.wait_event("worker-exited").time_s
        trains_s = cluster.wait_event("workers-training", count=2).time_s
        enough.touch()
        cluster.wait_done()
        account = account_of(cluster.events())
    assert account is not None
    lost = [one for one in account.intervals if one.incident]
    assert {one.incident for one in lost} == {1}
    assert {TimeCause.REBUILDING, TimeCause.STARTING} <= {one.cause for one in lost}
    lost_s = sum(one.seconds for one in lost)
    assert trains_s - noticed_s - 0.01 < lost_s < trains_s - killed_s + 0.01
    assert sum(one.seconds for one in account.intervals) == pytest.approx(account.wall_s)
    assert account.intervals[-1].cause is TimeCause.PRODUCTIVE
