"""What an unmodified script with Lightning's Fabric reduces, gathers and saves after losses."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "scripts" / "fabric_losses.py"


def run(tmp_path_factory, way, **options):
    """Run the script; return its folder, what it has said, and the agent's output."""
    folder = tmp_path_factory.mktemp("job")
    cluster = LocalCluster(
        [str(SCRIPT), str(folder), way], folder=tmp_path_factory.mktemp("cluster"), nnodes="1",
        nproc_per_node=4, min_workers=1, in_place=True, max_restarts=0,
        preload="torch,torch.distributed,torch.optim,lightning,torchmetrics", **options,
    )  # fmt: skip
    with cluster:
        node = cluster.start("a")
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        assert not cluster.events("restart"), cluster.story()
    by_step = {}
    for path in folder.glob("*.digests"):
        for line in path.read_text().splitlines():
            step, digest = line.split()
            by_step.setdefault(step, set()).add(digest)
    assert by_step and all(len(states) == 1 for states in by_step.values()), by_step
    return folder, json.loads((folder / "said.json").read_text()), node.output


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A job of four workers, of which one is left."""
    return run(tmp_path_factory, "asks", ranks_may_change=True)


def test_a_reduction_of_a_collection_is_over_the_workers_that_are_left(asking):
    _, said, _ = asking
    assert said["mean"] == {"rank": pytest.approx(5 / 3), "one": 1.0}
    assert said["in place"] == said["mean"]["rank"]


def test_an_evaluation_after_a_loss_has_all_samples_and_training_as_many_steps_as_before(asking):
    _, said, _ = asking
    assert (said["size"], said["evaluated"], said["trained"]) == (3, 24, 18)


def test_a_gather_that_a_loss_interrupts_is_made_again_with_its_gradient(asking):
    _, said, _ = asking
    assert said["gathered"] == [1.0, 3.0]
    assert said["gradient"] == 6.0


def test_a_save_that_the_loss_of_rank_0_interrupts_is_made_by_another_worker(asking):
    assert asking[1]["step"] == 3


def test_the_next_rank_0_prints_and_continues_the_log(asking):
    folder, _, output = asking
    assert "printed by 2" in output
    rows = (folder / "log" / "version_0" / "metrics.csv").read_text().split()
    assert rows == ["loss,step", *(f"{step}.0,{step}" for step in (1, 2, 3, 4))]


def test_a_script_with_fabric_that_keeps_its_size_has_right_means(tmp_path_factory):
    _, said, _ = run(tmp_path_factory, "keeps")
    assert said == {
        "mean": pytest.approx(8 / 3), "fabric": pytest.approx(8 / 3),
        "metric": pytest.approx(8 / 3), "size": 4,
    }  # fmt: skip
