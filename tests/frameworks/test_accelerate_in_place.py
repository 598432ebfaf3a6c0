"""An unmodified Accelerate script under --in-place: its rank and world size follow the world."""

import json
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "scripts" / "accelerate_in_place.py"


def test_after_a_loss_accelerates_rank_and_size_are_those_of_the_world_and_its_schedule_goes_on(
    tmp_path,
):
    folder = tmp_path / "said"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder)], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, in_place=True, max_restarts=0,
        preload="torch,torch.distributed,torch.optim,accelerate",
    )  # fmt: skip

    def said():
        """What each process has written; a last line may be half written."""
        texts = {int(path.stem): path.read_text() for path in folder.glob("*.jsonl")}
        whole = {pid: text.rpartition("\n")[0].splitlines() for pid, text in texts.items()}
        return {pid: [json.loads(line) for line in lines] for pid, lines in whole.items()}

    def made_steps(pids, world):
        lines = said()
        return all(lines.get(pid) and lines[pid][-1]["world"] == world for pid in pids)

    with cluster:
        node = cluster.start("a")
        cluster.wait_world(nodes=1)
        left = {*cluster.world().pids["a"]}
        cluster.wait(lambda: made_steps(left, 3), "steps of three")
        lost = cluster.world().pids["a"][1]
        (folder / f"{lost}.hold").touch()
        cluster.wait((folder / f"{lost}.held").exists, "a step after which one can be lost")
        assert node.kill_worker(1) == lost
        left -= {lost}
        cluster.wait(lambda: made_steps(left, 2), "steps of two")
        (folder / "enough").touch()
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        assert not cluster.events("restart"), cluster.story()
    first, second = (said()[pid] for pid in sorted(left))
    assert [line["digest"] for line in first] == [line["digest"] for line in second]
    for line in (*first, *second):
        assert line["size"] == line["world"]
    # A prepared scheduler steps once for each process that its loader deals to, lost or not.
    assert [line["scheduled"] for line in first] == [3 * (n + 1) for n in range(len(first))]
    assert {first[-1]["rank"], second[-1]["rank"]} == {0, 1}
