"""Over NCCL: survivors keep their processes, who comes is healed, and no bit depends on the world.

These have been run on no machine yet: there was none with as many GPUs as each of them needs. NCCL
wants a GPU of its own for each worker.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))
from test_deterministic_in_place import Changing
from test_recovery_in_place import InPlace

GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])
pytestmark = pytest.mark.gpu


def needs(count: int, what: str) -> pytest.MarkDecorator:
    reason = f"needs {count} NVIDIA GPUs, here are {GPUS}. NOT RUN over CUDA: {what}"
    return pytest.mark.skipif(count > GPUS, reason=reason)


class OnGpus(Changing):
    """Nodes of one worker, each with a GPU of its own."""

    def start(self, *names):
        for name in names:
            self.cluster.start(name, env={"CUDA_VISIBLE_DEVICES": str("abcde".index(name))})
        self.names += names
        self.settle()


@needs(2, "a worker dies; abort of a communicator, another world, healing of the successor")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_the_other_no_process_and_its_successor_is_healed(tmp_path, victim):
    job = InPlace(tmp_path, nnodes="1", nproc_per_node=2, min_workers=1)
    with job.cluster:
        node = job.cluster.start("a")
        before = set(job.wait_steps(5, 2))
        dead = node.kill_worker(victim)
        after = job.wait_steps(5, 2)
        assert before - {dead} < set(after) and dead not in after
        assert len(job.ends_exact()) == 2


@needs(3, "a node dies and comes back, another leaves; three members after one")
def test_nodes_that_die_come_and_leave_lose_no_step_and_do_none_twice(tmp_path):
    job = InPlace(tmp_path)
    with job.cluster:
        for number, name in enumerate("abc"):
            job.cluster.start(name, env={"CUDA_VISIBLE_DEVICES": str(number)})
        job.wait_steps(5, 3)
        job.cluster.node("a").kill()
        job.wait_steps(5, 2)
        job.cluster.start("a", env={"CUDA_VISIBLE_DEVICES": "0"})
        job.wait_steps(5, 3)
        job.cluster.node("b").stop()
        job.wait_steps(5, 2)
        assert len(job.ends_exact()) == 2


@needs(1, "deterministic=True in a job of one")
def test_a_job_of_one_ends_with_the_same_bits_as_without_a_launcher(tmp_path):
    job = OnGpus(tmp_path)
    with job.cluster:
        job.start("a")
        job.same_as_undisturbed()


@needs(2, "deterministic=True in worlds of one and two")
def test_a_worker_killed_an_arrival_and_a_leave_change_no_bit(tmp_path):
    job = OnGpus(tmp_path)
    with job.cluster:
        job.start("a", "b")
        job.cluster.node("a").kill_worker()
        job.settle()
        job.drop("b", "kill")
        job.start("b")
        job.drop("a", "stop")
        job.same_as_undisturbed()
