"""An evaluation of an unmodified Hugging Face Trainer in which a worker is lost."""

import pytest
from loss_jobs import LossJob

pytest.importorskip("transformers")
PRELOAD = "torch,torch.distributed,torch.optim,transformers.trainer"


def test_an_evaluation_that_a_loss_interrupts_is_made_again_on_the_whole_dataset(tmp_path_factory):
    job = LossJob(
        tmp_path_factory.mktemp, "trainer_evaluations.py", nproc_per_node=3,
        ranks_may_change=True, preload=PRELOAD,
    )  # fmt: skip
    assert job.said["steps"] == 6
    cut_off, again, cut_off_too, again_too, last = job.said["evaluated"]
    assert again == again_too == last == [*range(50)]
    assert len(cut_off) < 50 and len(cut_off_too) < 50, "these are discarded"
