"""An unmodified Lightning script under --in-place: two of three workers are lost, rank 0 too."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from elastane.testing import LocalCluster

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "scripts" / "lightning_in_place.py"
SAMPLES = 768


def lines_of(folder, what):
    """What each process has written, by pid; a last line may be half written."""
    found = {}
    for path in folder.glob("*.jsonl"):
        whole = path.read_text().rpartition("\n")[0].splitlines()
        found[int(path.stem)] = [x for x in map(json.loads, whole) if x["what"] == what]
    return found


def test_survivors_of_a_lightning_script_train_validate_log_and_save_as_one_world(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    cluster = LocalCluster(
        [str(SCRIPT), str(folder)], folder=tmp_path / "c", nnodes="1", nproc_per_node=3,
        min_workers=1, max_restarts=0, in_place=True, ranks_may_change=True,
        preload="torch,torch.distributed,torch.optim,lightning",
    )  # fmt: skip

    def wait_validations(count, pids):
        """Wait until each worker has validated `count` more times."""
        before = {pid: len(lines) for pid, lines in lines_of(folder, "validation").items()}

        def there():
            lines = lines_of(folder, "validation")
            return all(len(lines.get(pid, ())) >= before.get(pid, 0) + count for pid in pids)

        cluster.wait(there, f"{count} validations of {sorted(pids)}")

    with cluster:
        node = cluster.start("a")
        cluster.wait_world(nodes=1)
        left = {*cluster.world().pids["a"]}
        wait_validations(1, left)
        for rank in (2, 0):
            # Not in a broadcast of the worker that is lost, which restarts all.
            (folder / "held").unlink(missing_ok=True)
            (folder / "hold").touch()
            cluster.wait((folder / "held").exists, "a training step")
            lost = node.kill_worker(rank)
            left -= {lost}
            (folder / "hold").unlink()
            wait_validations(2, left)
        (folder / "enough").touch()
        cluster.wait(lambda: not node.is_alive, "the agent ends")
        assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
        assert not cluster.events("restart"), cluster.story()
    by_step = defaultdict(set)
    for lines in lines_of(folder, "step").values():
        for line in lines:
            by_step[line["number"]].add((line["digest"], line["world"]))
    assert {world for states in by_step.values() for _, world in states} == {3, 2, 1}
    # One that is killed may have written the step in which the others lost it.
    survivor = left.pop()
    steps = lines_of(folder, "step")[survivor]
    assert [line["number"] for line in steps] == [*range(len(steps))]
    last = lines_of(folder, "validation")[survivor][-1]
    assert last["seen"] == SAMPLES, "the share of lost workers is validated, too"
    [end] = lines_of(folder, "end")[survivor]
    assert end["step"] == last["step"], "the last checkpoint is that of the last validation"
    assert end["accuracy"] == pytest.approx(last["accuracy"], abs=1e-6)
    rows = (folder / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,") and sum(row.startswith("epoch,") for row in rows) == 1
    column = rows[0].split(",").index("step")
    numbers = [int(row.split(",")[column]) for row in rows[1:]]
    assert numbers == sorted(numbers) and numbers[-1] >= last["step"] - 8
