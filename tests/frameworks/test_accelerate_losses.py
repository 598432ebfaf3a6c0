"""What an unmodified Accelerate script evaluates, saves and logs after the loss of workers."""

import pytest
from loss_jobs import LossJob

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of four workers, of which one is left."""
    return LossJob(
        tmp_path_factory.mktemp, "accelerate_losses.py", nproc_per_node=4, ranks_may_change=True,
        preload="torch,torch.distributed,torch.optim,accelerate",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["evaluated", "objects"])
def test_an_evaluation_has_each_sample_of_the_workers_that_are_left_once(job, kind):
    whole, interrupted, after = job.said[kind]
    everything = [*range(20)]
    assert whole == everything
    # Worker 1 has the second batch of four. In the third round the others repeat, but the first.
    assert after == [each for each in everything if each not in (2, 3, 10, 11, 18, 19)]
    assert interrupted == [each for each in everything if each not in (10, 11, 18, 19)]


def test_models_in_eval_are_evaluated_on_the_whole_dataset_in_its_order_after_a_loss(job):
    assert job.said["in eval"] == [*range(20)]
    assert job.said["rounds"] == 4, "10 batches for three workers"


def test_a_loader_of_training_keeps_its_number_of_steps_also_for_models_in_eval(job):
    assert job.said["rounds of training"] == 3, "10 batches for four workers"


def test_a_save_that_a_loss_interrupts_is_made_again_under_its_own_number(job):
    assert job.said["numbers"] == 3
    kept = sorted(each.name for each in (job.folder / "checkpoints").iterdir())
    assert kept == ["checkpoint_1", "checkpoint_2"]
    for name in kept:
        assert (job.folder / "checkpoints" / name / "optimizer.bin").exists()


def test_the_main_process_may_save_alone_into_a_folder_of_its_own(job):
    assert (job.folder / "alone" / "optimizer.bin").exists()


def test_the_next_main_process_logs_to_the_trackers_and_prints(job):
    assert (job.folder / "tracked").read_text().split() == ["1:1", "2:2"]
    assert "printed by 3" in job.output


def test_a_worker_without_a_file_of_its_rank_continues_at_the_batch_of_the_others(job):
    assert job.said["step"] == 3


def test_a_mean_that_a_loss_interrupts_is_that_of_the_workers_that_are_left(job):
    assert job.said["mean"] == 3.0
