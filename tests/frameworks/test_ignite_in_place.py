"""What the metrics of an unmodified script of PyTorch-Ignite are after the loss of a worker."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("ignite")
SCRIPT = Path(__file__).parent / "scripts" / "ignite_losses.py"


# The second sum is of the accuracy; the sixth gathers the labels of a metric of whole epochs.
@pytest.mark.parametrize(("may_change", "sum_"), [(True, 2), (False, 2), (True, 6)])
def test_a_metric_that_a_loss_interrupts_is_over_the_workers_that_are_left(
    tmp_path, may_change, sum_
):
    folder = tmp_path / "job"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder), str(sum_)], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, in_place=True, max_restarts=0, ranks_may_change=may_change,
        preload="torch,torch.distributed,torch.optim,ignite.metrics",
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
    said = json.loads((folder / "said.json").read_text())
    found = {"accuracy": 0.25, "loss": 1.0, "samples": 8.0, "alone": 1}
    assert said == {**found, "again": found, "running": 1.0}
