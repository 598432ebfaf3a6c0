"""A Trainer of Lightning sees the workers that are left, also without --ranks-may-change."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "scripts" / "trainer_follows.py"


@pytest.mark.parametrize("maker", ["own", "trainers"])
def test_a_trainer_that_runs_sees_the_workers_that_are_left(tmp_path, maker):
    folder = tmp_path / "job"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder), maker], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, in_place=True, max_restarts=0,
        preload="torch,torch.distributed,torch.optim,lightning",
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
    said = json.loads((folder / "said.json").read_text())
    assert said == {"world": 2, "rank": 2.0}
