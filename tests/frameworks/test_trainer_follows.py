"""A Trainer of Lightning sees the workers that are left, also without --ranks-may-change."""

import pytest
from loss_jobs import LossJob

pytest.importorskip("lightning")


@pytest.mark.parametrize("maker", ["own", "trainers"])
def test_a_trainer_that_runs_sees_the_workers_that_are_left(tmp_path_factory, maker):
    job = LossJob(
        tmp_path_factory.mktemp, "trainer_follows.py", maker, nproc_per_node=3,
        preload="torch,torch.distributed,torch.optim,lightning",
    )  # fmt: skip
    assert job.said == {"world": 2, "rank": 2.0}
