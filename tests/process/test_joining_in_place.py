"""DDP scripts with an ElasticLoader: lost workers are replaced, and nodes join, in place."""

from pathlib import Path

import pytest
from jobs import PRELOAD_COMPILER
from joining import JoiningJob, kill

SCRIPT = Path(__file__).parent / "scripts" / "joining_ddp.py"


def made(folder, mode="plain", **options):
    """Return a job of the script."""
    return JoiningJob(SCRIPT, folder, mode, preload=PRELOAD_COMPILER, **options)


@pytest.mark.parametrize("mode", ["plain", "accumulate"])
def test_a_lost_worker_is_replaced_while_the_others_train_on(tmp_path, mode):
    job = made(tmp_path, mode)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(3)
        lost = {min(first)}
        kill(lost)
        job.passes_size(2)
        second = job.wait_size(3)
        assert first - lost < second, "the survivors kept their processes"
        job.ends_well()
        assert job.missing() == 0
        assert len(cluster.events("replacement")) == 1


def test_no_sample_of_a_stream_is_wrong_wherever_in_a_step_a_worker_is_lost(tmp_path):
    job = made(tmp_path, "stream", nproc_per_node=4)
    with job.cluster as cluster:
        cluster.start("a")
        left = job.wait_size(4)
        for place in ("read", "second", "last"):
            lost = max(left)
            job.kill_at(lost, place)
            job.passes_size(3)
            assert left - {lost} < job.wait_size(4), place
            left = job.wait_size(4)
        job.ends_well()
        assert job.missing() == 0
        assert len(cluster.events("replacement")) == 3


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_workers_over_a_stream_are_killed_at_random_and_no_replica_or_sample_is_wrong(
    tmp_path, seed
):
    job = made(tmp_path, "stream", nproc_per_node=2, max_restarts=100)
    job.survives_random_kills(12, seed)


def test_a_node_that_arrives_joins_and_one_that_leaves_is_left_without_a_lost_sample(tmp_path):
    job = made(tmp_path, nproc_per_node=2)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(2)
        cluster.start("b")
        assert first < job.wait_size(4)
        cluster.node("b").stop()
        assert job.wait_size(2, count=5) == first
        job.ends_well()
        assert job.missing() == 0


def test_workers_that_die_before_they_have_joined_delay_no_other(tmp_path):
    job = made(tmp_path)
    with job.cluster as cluster:
        cluster.start("a")
        first = job.wait_size(3)
        kill({max(first)})
        job.kill_the_next_that_is_ready()
        job.kill_the_next_that_is_ready()
        assert job.wait_size(3) > first - {max(first)}
        job.ends_well()


def test_an_unnamed_optimizer_is_refused_before_any_worker_joins(tmp_path):
    job = made(tmp_path, "unnamed", nnodes="1", nproc_per_node=2, max_restarts=0)
    with job.cluster as cluster:
        node = cluster.start("a")
        assert node.wait() != 0
        assert "AdamW that steps was not named to the ElasticLoader" in node.output
        assert "elastic-loader" in node.output


def test_a_collective_before_the_loop_ends_only_the_worker_that_joins(tmp_path):
    job = made(tmp_path, "early", max_restarts=1)
    with job.cluster as cluster:
        node = cluster.start("a")
        first = job.wait_size(3)
        kill({max(first)})
        cluster.wait(lambda: "joins-later" in node.output, "the refusal")
        assert job.wait_size(2, count=5) == first - {max(first)}
        job.ends_well()
