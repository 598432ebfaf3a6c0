"""Workers that read shards are killed, leave and arrive: each sample is committed exactly once.

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
from elastane.testing.cluster import LocalNode

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from streamed import BATCH, LENGTHS, SAMPLES, numbers

SCRIPT = Path(__file__).parent / "scripts" / "streamed.py"
STEP_S = 0.03
STEPS = -(-SAMPLES // BATCH)


class Streamed:
    """A local cluster that trains over a stream, and its workers' records."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.said_folder = folder / "said"
        self.said_folder.mkdir()
        self._told = Growing(self.said_folder)
        script = [str(SCRIPT), str(self.said_folder), str(STEP_S), kind]
        options = {"nnodes": "1:3", "nproc_per_node": 1, "max_restarts": 100, "redirects": "3"}
        options["rdzv_conf"] = {"last_call": 1, "gather": 0.2}
        self.cluster = LocalCluster(
            script, folder=folder / "c", preload=PRELOAD_OPTIMIZER, **options
        )

    def committed(self) -> list[dict]:
        return [line for lines in self._told.lines().values() for line in lines]

    def hang_reading(self, node: LocalNode) -> None:
        """Let the node's worker hang in its source, and wait until it does."""
        self.cluster.wait(node.workers, "its agent names its worker")
        hang = self.said_folder / f"{node.workers()[0]}.hang"
        hang.touch()
        self.cluster.wait(lambda: not hang.exists(), "a worker hangs in its source")

    def wait_steps(self, count: int, world: int) -> None:
        """Wait until this number of further steps are committed, in a world of this size."""
        end = max((line["step"] for line in self.committed()), default=-1) + count
        self.cluster.wait(
            lambda: any(x["step"] >= end and x["world"] == world for x in self.committed()),
            f"{count} steps of a world of {world}",
        )

    def ends_exact(self) -> None:
        """End the job after an epoch: each sample was committed once in each of them."""
        (self.said_folder / "enough").touch()
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: not any(node.is_alive for node in nodes), "all agents end")
        assert self.cluster.events("job-ended")[-1].data["ok"] is True
        finals = [json.loads(path.read_text()) for path in self.said_folder.glob("*.final")]
        assert finals
        for final in finals:
            epochs, rest = divmod(final["steps"], STEPS)
            assert epochs and not rest
            wrong = {n: count for n, count in enumerate(final["counts"]) if count != epochs}
            assert not wrong, f"of {len(wrong)} samples"
            assert final["ends"][-1] == final["steps"] - 1
            assert all((step + 1) % STEPS == 0 for step in final["ends"])


def write(kind: str, folder: Path) -> None:
    """Write the samples as a source of this kind expects them, with its own package."""
    if kind == "webdataset":
        write_tars(folder)
    if kind == "litdata":
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder / kind), chunk_size=100)
        for number in range(SAMPLES):
            writer.add_item(number, {"number": number})
        writer.done()
        writer.merge()
    if kind == "mosaicml":
        from streaming import MDSWriter

        columns = {"number": "int"}
        with MDSWriter(out=str(folder / kind), columns=columns, size_limit=2_000) as mds:
            for number in range(SAMPLES):
                mds.write({"number": number})


def write_tars(folder: Path) -> None:
    for shard in range(len(LENGTHS)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers(shard):
                member = tarfile.TarInfo(f"{number:05}.txt")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("lists", "torch"),
        pytest.param("webdataset", "webdataset", marks=pytest.mark.soak),
        pytest.param("hugging_face", "datasets", marks=pytest.mark.soak),
        pytest.param("litdata", "litdata", marks=pytest.mark.soak),
        pytest.param("mosaicml", "streaming", marks=pytest.mark.soak),
    ],
)
def test_each_sample_is_committed_once_while_workers_are_killed_leave_and_arrive(
    kind, package, tmp_path
):
    pytest.importorskip(package)
    job = Streamed(tmp_path, kind)
    write(kind, job.said_folder)
    with job.cluster:
        a, b = (job.cluster.start(name) for name in "ab")
        job.wait_steps(5, 2)
        if kind == "lists":
            job.hang_reading(b)
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


def test_after_the_loss_of_all_workers_a_job_resumes_within_its_shards(tmp_path):
    job = Streamed(tmp_path, "lists")
    with job.cluster:
        nodes = [job.cluster.start(name) for name in "ab"]
        job.cluster.wait_event("checkpoint-saved")
        for node in nodes:
            node.kill()
        job.cluster.start("c")
        job.wait_steps(5, 1)
        assert job.cluster.wait_event("restored").data["step"] % STEPS, "within an epoch"
        job.ends_exact()
