"""An agent and a survivor have the same resources after many lost workers as after a few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from held import SLACK, held_by_worker, holds_again, outlives
from jobs import PRELOAD_COMPILER
from joining import JoiningJob, kill
from supervise import zygote_and_stores
from test_recovery_in_place import InPlace
from test_spares_in_place import spares

FEW, MANY = 3, 9
LOADER = Path(__file__).parent / "scripts" / "joining_ddp.py"


def held(job):
    """Return how many descriptors and threads the agent has while nothing happens."""
    pid = job.cluster.nodes[0].process.pid
    if job.spares:
        job.cluster.wait(lambda: spares(job), "a spare waits")
    job.cluster.wait(lambda: len(zygote_and_stores(pid)) == 3, "the process of the next store")
    counts = []
    for _ in range(2):
        job.wait_steps(2, 2)
        counts.append([len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")])
    return [min(pair) for pair in zip(*counts, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"redirects": "3"}, marks=pytest.mark.soak),
        pytest.param({"spares_per_node": 1}, marks=pytest.mark.soak),
    ],
    ids=["shown", "redirected", "with-a-spare"],
)
def test_descriptors_and_threads_of_an_agent_do_not_grow_with_lost_workers(tmp_path, options):
    conf = {"crash_loop": 0}
    job = InPlace(tmp_path, nnodes="1", nproc_per_node=2, min_workers=1, rdzv_conf=conf, **options)
    job.spares = "spares_per_node" in options
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(2, 2)
        counted = {}
        for number in range(1, MANY + 1):
            node.kill_worker(number % 2)
            job.wait_steps(2, 2)
            if number in (FEW, MANY):
                counted[number] = held(job)
        few, many = counted.values()
        assert all(b <= a + SLACK for a, b in zip(few, many, strict=True)), counted
        job.ends_exact()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_survivor_of_a_hundred_losses_holds_what_it_held_after_ten(tmp_path):
    options = {"nproc_per_node": 3, "min_workers": 1, "max_restarts": 1000}
    job = InPlace(tmp_path, nnodes="1", rdzv_conf={"crash_loop": 0}, **options)
    with job.cluster:
        node = job.cluster.start("a")
        job.wait_steps(2, 3)
        survivor = next(pid for pid, lines in job.said().items() if lines[-1]["rank"] == 0)
        for number in range(100):
            if number == 10:
                before = held_by_worker(survivor)
            kill({max(pid for pid in node.workers() if pid != survivor)})
            job.wait_steps(1, 3)
        holds_again(job, survivor, before)
        job.ends_exact()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_survivor_of_an_elastic_loader_holds_after_a_hundred_losses_what_it_held(tmp_path):
    conf = "last_call=0.1,crash_loop=0"
    job = JoiningJob(LOADER, tmp_path, preload=PRELOAD_COMPILER, max_restarts=1000, rdzv_conf=conf)
    with job.cluster as cluster:
        cluster.start("a")
        survivor = min(job.wait_size(3))
        outlives(job, survivor, few=10, many=100)
        job.ends_well()
        assert job.missing() == 0
