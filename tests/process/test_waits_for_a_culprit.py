"""Which worker of an unmodified script the others wait for, and what it does instead."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from culprit_jobs import CLASSES, ENDED, CulpritJob

SOAK_FAULTS = 200


def test_the_culprit_is_named_with_what_it_does_instead(tmp_path):
    """In one job: what may end by itself is only reported, and what never ends is ended."""
    job = CulpritJob(tmp_path)
    with job.cluster:
        job.cluster.start("a")
        job.wait_steps()
        first = job.steps()
        for fault, rank in (("loop", 0), ("loader", 2), ("disk", 1)):
            found, _ = job.fault(fault, rank)
            assert found.data["class"] == CLASSES[fault], found.reason
            assert found.data["ranks"] == str(rank), found.reason
            assert found.reason.startswith(f"rank {rank} on node a has not entered all_reduce #")
            where = "waits_for_a_culprit" if fault == "loader" else "reduce"
            assert f" ({where}.py:" in found.reason
            assert not found.data["certain"]
        after = {rank: pid for rank, (pid, _) in job.steps().items()}
        assert after == {rank: pid for rank, (pid, _) in first.items()}, "no worker was ended"
        assert not job.cluster.events("restart")
        found = job.stop_worker(1)
        assert (found.data["class"], found.data["ranks"]) == ("stopped", "1"), found.reason
        assert "is stopped by a signal" in job.cluster.events("restart")[-1].data["cause"]
        found, _ = job.fault("other", 2)
        assert (found.data["class"], found.data["ranks"]) == ("other-collective", "2"), found.reason
        assert "rank 2 called broadcast (waits_for_a_culprit.py:" in found.reason
        assert "ranks 0-1 called all_reduce (reduce.py:" in found.reason


def test_without_the_ring_nothing_is_recorded_and_nobody_is_named(tmp_path):
    job = CulpritJob(tmp_path, no_collective_ring=True)
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps()
        job.told.write_text("sleep 1")
        job.wait_still()
        assert not job.cluster.events("culprit")
        job.told.unlink()
        job.wait_steps()
        assert node.is_alive


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_faults_name_the_right_rank_and_kind(tmp_path):
    """At least 95 of 100; prints the table."""
    choose = random.Random(7)
    right, all_of, late = Counter(), Counter(), []
    job = CulpritJob(tmp_path, workers=4)
    with job.cluster:
        job.cluster.start("a")
        job.wait_steps()
        for _ in range(SOAK_FAULTS):
            fault, rank = choose.choice([*CLASSES]), choose.randrange(4)
            job.wait_steps(choose.randrange(1, 40))
            found, took_s = job.fault(fault, rank)
            all_of[fault] += 1
            fits = (found.data["class"], found.data["ranks"]) == (CLASSES[fault], str(rank))
            right[fault] += fits
            late.append(took_s)
            if not fits:
                print(fault, rank, found.reason)
    for fault in sorted(all_of):
        print(f"{fault:8} {right[fault]:4} of {all_of[fault]}")
    print(f"found after {sorted(late)[len(late) // 2]:.1f} s, {max(late):.1f} s at most")
    assert sum(right.values()) >= 0.95 * SOAK_FAULTS, right
    assert len(job.cluster.events("restart")) == sum(all_of[fault] for fault in ENDED)
