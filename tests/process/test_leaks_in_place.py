"""An agent has the same resources after many lost workers as after a few."""

from __future__ import annotations

import os

import pytest
from test_recovery_in_place import InPlace
from test_spares_in_place import spares

FEW, MANY = 3, 9
# A worker that was a spare holds two descriptors and a thread more. One leaked a death is six.
SLACK = 4


def held(job):
    """Return how many descriptors and threads the agent has while nothing happens."""
    pid = job.cluster.nodes[0].process.pid
    if job.spares:
        job.cluster.wait(lambda: spares(job), "a spare waits")
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
