"""What a framework's script logs is written once per step, though rank 0 is lost."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "scalars_logged.py"
# As the script has them.
STEPS, EVERY = 60, 5
MODULES = {
    "trainer": "transformers.trainer",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
# The number of the first step, by which each of them counts.
FIRST = {"trainer": 1, "lightning": 0, "accelerate": 1}


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("trainer", marks=pytest.mark.soak),
        pytest.param("lightning", marks=pytest.mark.soak),
        "accelerate",
    ],
)
def test_what_a_framework_logs_is_written_once_though_rank_0_is_lost(tmp_path, framework):
    pytest.importorskip(MODULES[framework].partition(".")[0])
    path = tmp_path / "scalars.jsonl"
    cluster = LocalCluster(
        [str(SCRIPT), str(tmp_path), framework], folder=tmp_path / "c", nnodes="1",
        nproc_per_node=3, min_workers=1, max_restarts=3, in_place=True, ranks_may_change=True,
        preload=f"torch,torch.distributed,torch.optim,{MODULES[framework]}",
    )  # fmt: skip

    def steps():
        """The steps that have a loss."""
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]

    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: len(steps()) >= 3, "three values")
        node.kill_worker(0)
        cluster.wait_done()
    last = STEPS - 1 + FIRST[framework]
    assert steps() == [*range(EVERY - 1 + FIRST[framework], last + 1, EVERY)]
