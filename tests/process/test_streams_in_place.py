"""Workers that read a stream are killed, leave and arrive: each sample is committed exactly once.

The model counts the committed samples, so that a missing or doubled one is a wrong weight.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from streamed import BATCH, LENGTHS, SAMPLES, numbers

SCRIPT = Path(__file__).parent / "scripts" / "streamed.py"
EPOCHS, STEP_S = 4, 0.03
STEPS = -(-SAMPLES // BATCH)


class Streamed:
    """A local cluster that trains over a stream, and what its workers have said."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.said_folder = folder / "said"
        self.said_folder.mkdir()
        self._told = Growing(self.said_folder)
        script = [str(SCRIPT), str(self.said_folder), str(EPOCHS), str(STEP_S), kind]
        options = {"nnodes": "1:3", "nproc_per_node": 1, "max_restarts": 100, "redirects": "3"}
        options["rdzv_conf"] = {"last_call": 1, "gather": 0.2}
        self.cluster = LocalCluster(
            script, folder=folder / "c", preload=PRELOAD_OPTIMIZER, **options
        )

    def committed(self) -> list[dict]:
        return [line for lines in self._told.lines().values() for line in lines]

    def wait_steps(self, count: int, world: int) -> None:
        """Wait until so many more steps are committed, in a world of this size."""
        end = max((line["step"] for line in self.committed()), default=-1) + count
        self.cluster.wait(
            lambda: any(x["step"] >= end and x["world"] == world for x in self.committed()),
            f"{count} steps of a world of {world}",
        )

    def ends_exact(self) -> None:
        """Wait for the end: each sample was committed once in each epoch."""
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        finals = [json.loads(path.read_text()) for path in self.said_folder.glob("*.final")]
        assert finals
        for final in finals:
            counts = final["counts"]
            wrong = {n: count for n, count in enumerate(counts) if count != EPOCHS}
            assert not wrong, f"of {len(wrong)} samples"
            assert final["steps"] == EPOCHS * STEPS
            assert final["ends"][-1] == EPOCHS * STEPS - 1
            assert all((step + 1) % STEPS == 0 for step in final["ends"])


def write_tars(folder: Path) -> None:
    for shard in range(len(LENGTHS)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers(shard):
                member = tarfile.TarInfo(f"{number:05}.txt")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))


@pytest.mark.parametrize(
    "kind",
    ["lists", *(pytest.param(n, marks=pytest.mark.soak) for n in ("webdataset", "hugging_face"))],
)
def test_each_sample_is_committed_once_while_workers_are_killed_leave_and_arrive(kind, tmp_path):
    if kind != "lists":
        pytest.importorskip({"webdataset": "webdataset", "hugging_face": "datasets"}[kind])
    job = Streamed(tmp_path, kind)
    write_tars(job.said_folder)
    with job.cluster:
        a, b = (job.cluster.start(name) for name in "ab")
        job.wait_steps(5, 2)
        b.kill_worker()
        job.wait_steps(5, 2)
        c = job.cluster.start("c")
        job.wait_steps(5, 3)
        a.kill()
        job.wait_steps(5, 2)
        c.stop()
        job.wait_steps(5, 1)
        job.ends_exact()
    assert not job.cluster.events("restart")
