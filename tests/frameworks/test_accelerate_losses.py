"""What an unmodified Accelerate script evaluates, saves and logs after the loss of workers."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "scripts" / "accelerate_losses.py"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job of four workers, of which one is left, and its output."""
    folder = tmp_path_factory.mktemp("job")
    cluster = LocalCluster(
        [str(SCRIPT), str(folder)], folder=tmp_path_factory.mktemp("cluster"), nnodes="1",
        nproc_per_node=4, min_workers=1, in_place=True, max_restarts=0, ranks_may_change=True,
        preload="torch,torch.distributed,torch.optim,accelerate",
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        assert not cluster.events("restart"), cluster.story()
    return folder, node.output


def said(folder):
    """What the last worker has written."""
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("kind", ["evaluated", "objects"])
def test_an_evaluation_has_each_sample_of_the_workers_that_are_left_once(job, kind):
    whole, interrupted, after = said(job[0])[kind]
    everything = [*range(20)]
    assert whole == everything
    # Worker 1 has the second batch of four. In the third round the others repeat, but the first.
    assert after == [each for each in everything if each not in (2, 3, 10, 11, 18, 19)]
    assert interrupted == [each for each in everything if each not in (10, 11, 18, 19)]


def test_a_save_that_a_loss_interrupts_is_made_again_under_its_own_number(job):
    folder, _ = job
    assert said(folder)["numbers"] == 3
    kept = sorted(each.name for each in (folder / "checkpoints").iterdir())
    assert kept == ["checkpoint_1", "checkpoint_2"]
    for name in kept:
        assert (folder / "checkpoints" / name / "optimizer.bin").exists()


def test_the_next_main_process_logs_to_the_trackers_and_prints(job):
    folder, output = job
    assert (folder / "tracked").read_text().split() == ["1:1", "2:2"]
    assert "printed by 3" in output


def test_a_worker_without_a_file_of_its_rank_continues_at_the_batch_of_the_others(job):
    assert said(job[0])["step"] == 3


def test_a_mean_that_a_loss_interrupts_is_that_of_the_workers_that_are_left(job):
    assert said(job[0])["mean"] == 3.0
