"""An unmodified Hugging Face Trainer under --in-place loses workers, that of rank 0 included."""

import json
from pathlib import Path

import pytest
import torch

from elastane.testing import LocalCluster

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parent / "scripts" / "trainer_in_place.py"


@pytest.mark.soak
def test_the_trainer_continues_and_saves_after_the_loss_of_rank_0_in_a_save(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder)], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, in_place=True, ranks_may_change=True, max_restarts=0,
        preload="torch,torch.distributed,torch.optim,transformers.trainer",
    )  # fmt: skip

    def said():
        """What each process has written; a last line may be half written."""
        texts = {int(path.stem): path.read_text() for path in folder.glob("*.jsonl")}
        whole = {pid: text.rpartition("\n")[0].splitlines() for pid, text in texts.items()}
        return {pid: [json.loads(line) for line in lines] for pid, lines in whole.items()}

    def made_steps(pids, world):
        lines = said()
        return all(lines.get(pid) and lines[pid][-1]["world"] == world for pid in pids)

    def saved():
        return {*(folder / "checkpoints").glob("checkpoint-*")}

    with cluster:
        node = cluster.start("a")
        cluster.wait_world(nodes=1)
        left = {*cluster.world().pids["a"]}
        cluster.wait(lambda: made_steps(left, 3) and saved(), "steps of three, and a checkpoint")
        before = saved()
        cluster.wait(lambda: saved() - before, "another save begins")
        left -= {node.kill_worker(0)}
        during = saved() | before
        cluster.wait(lambda: made_steps(left, 2) and saved() - during, "a survivor saves")
        (folder / "enough").touch()
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        assert not cluster.events("restart"), cluster.story()
    first, second = (said()[pid] for pid in sorted(left))
    assert [line["digest"] for line in first] == [line["digest"] for line in second]
    for line in (*first, *second):
        assert line["size"] == line["world"]
        assert line["saves"] == (line["rank"] == 0)
    # Each seventh step is logged, by another worker after the loss, but for the last step itself.
    assert node.output.count("{'loss'") in {(first[-1]["step"] - one) // 7 for one in (0, 1)}
    # Each checkpoint is whole, the one that was interrupted too.
    for checkpoint in saved():
        assert (checkpoint / "trainer_state.json").stat().st_size
        torch.load(checkpoint / "optimizer.pt", weights_only=True)
    newest = folder / "checkpoints" / f"checkpoint-{first[-1]['step'] // 10 * 10}"
    assert newest in saved()
