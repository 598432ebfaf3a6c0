"""A framework's sum of what a script has divided by the world size, as a worker is lost."""

from pathlib import Path

import pytest

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "framework_sums.py"


@pytest.mark.parametrize(
    ("way", "package"), [("accelerate", "accelerate"), ("fabric", "lightning")]
)
def test_a_sum_is_not_made_again_without_a_part_that_was_divided(tmp_path, way, package):
    pytest.importorskip(package)
    folder = tmp_path / "job"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder), way], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, in_place=True, max_restarts=1, ranks_may_change=True,
        preload=f"torch,torch.distributed,{package}",
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
    assert (folder / "sums").read_text().split() == ["1.000"] * 3
