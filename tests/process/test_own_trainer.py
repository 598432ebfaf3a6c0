"""examples/own_trainer.py: a user's own framework, whose workers are replaced and join."""

from pathlib import Path

import pytest
from jobs import PRELOAD_COMPILER
from joining import JoiningJob, kill

SCRIPT = Path(__file__).parent / "scripts" / "own_trainer_job.py"


def made(folder, **options):
    """Return a job of the script."""
    return JoiningJob(SCRIPT, folder, preload=PRELOAD_COMPILER, **options)


def test_a_custom_framework_replaces_rank_0_and_admits_a_node(tmp_path):
    job = made(tmp_path, nproc_per_node=2)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(2)
        lost = {job.rank_0()}
        kill(lost)
        job.killed |= lost
        job.passes_size(1)
        second = job.wait_size(2)
        assert first - lost < second, "the survivor kept its process"
        cluster.start("b")
        assert second < job.wait_size(4)
        job.ends_well()
        assert job.missing() == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_workers_die_at_random(tmp_path, seed):
    job = made(tmp_path, max_restarts=40)
    with job.cluster as cluster:
        cluster.start("a")
        job.wait_size(3)
        job.kill_at_random(8, seed)
        job.wait_size(3)
        job.ends_well()
        assert job.missing() == 0
