"""What the metrics of an unmodified script of PyTorch-Ignite are after the loss of a worker."""

import pytest
from loss_jobs import LossJob

pytest.importorskip("ignite")


# The second sum is of the accuracy, the third of the losses, which are floats; the sixth gathers
# the labels of a metric of whole epochs.
@pytest.mark.parametrize(
    ("may_change", "sum_"),
    [
        (True, 2),
        pytest.param(False, 2, marks=pytest.mark.soak),
        (True, 3),
        (True, 6),
    ],
)
def test_a_metric_that_a_loss_interrupts_is_over_the_workers_that_are_left(
    tmp_path_factory, may_change, sum_
):
    job = LossJob(
        tmp_path_factory.mktemp, "ignite_losses.py", str(sum_), nproc_per_node=3,
        ranks_may_change=may_change, preload="torch,torch.distributed,torch.optim,ignite.metrics",
    )  # fmt: skip
    found = {"accuracy": 0.25, "loss": 1.0, "samples": 8.0, "alone": 1}
    assert job.said == {**found, "again": found, "running": 1.0}
