"""Scripts that train by epochs: a worker that dies in a validation costs no epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from growing import Growing
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "epochs.py"
EPOCHS, PER_EPOCH = 6, 8


class Epochs:
    """A local cluster of one node that trains by epochs, and its workers' records."""

    def __init__(self, folder: Path, where: str, **options: object) -> None:
        self.said_folder = folder / "said"
        self.said_folder.mkdir()
        self._told = Growing(self.said_folder)
        script = [str(SCRIPT), str(self.said_folder), str(EPOCHS), "0.02", where]
        options = {"nnodes": "1", "nproc_per_node": 3, "min_workers": 1, **options}
        self.cluster = LocalCluster(
            script,
            folder=folder / "c",
            max_restarts=100,
            preload=PRELOAD_OPTIMIZER,
            redirects="3",
            **options,
        )

    def said(self, what: str) -> dict[int, list[dict]]:
        told = self._told.lines()
        return {int(n): [x for x in lines if x["what"] == what] for n, lines in told.items()}

    def finals(self) -> dict[int, dict]:
        found = self.said_folder.glob("*.final")
        return {int(path.stem): json.loads(path.read_text()) for path in found}

    def kill_in_validation(self) -> None:
        """Have one worker killed in the next validation, and wait until it was."""
        before = len([*self.said_folder.glob("died-*")])
        (self.said_folder / "die").touch()
        self.cluster.wait(
            lambda: len([*self.said_folder.glob("died-*")]) > before, "one is killed in validation"
        )


# Where the job needs all three, the others validate again only once a replacement is there.
@pytest.mark.parametrize(
    ("where", "fewest"),
    [
        ("behind", 1),
        pytest.param("between", 3, marks=pytest.mark.soak),
        pytest.param("behind", 3, marks=pytest.mark.soak),
        pytest.param("between", 1, marks=pytest.mark.soak),
    ],
)
def test_a_worker_killed_in_a_validation_costs_no_epoch_and_no_other_process(
    where, fewest, tmp_path
):
    job = Epochs(tmp_path, where, min_workers=fewest)
    (job.said_folder / "die").touch()  # in the first validation
    (job.said_folder / "stay").touch()
    with job.cluster:
        [node] = [job.cluster.start("a")]
        job.cluster.wait(lambda: [*job.said_folder.glob("died-*")], "one is killed in validation")
        job.cluster.wait(
            lambda: any(line["epoch"] >= 1 for e in job.said("value").values() for line in e),
            "the others validate again",
        )
        node.kill_worker()
        (job.said_folder / "stay").unlink()
        job.cluster.wait(lambda: not node.is_alive, "the job ends")
    assert job.cluster.events("job-ended")[-1].data["ok"] is True
    assert len(job.cluster.events("replacement")) == 2 and not job.cluster.events("restart")
    finals = job.finals()
    values = max((final["values"] for final in finals.values()), key=len)
    assert len(values) == EPOCHS and values[-1] > 0.9
    for final in finals.values():
        assert final["steps"] == EPOCHS * PER_EPOCH
        assert final["weights"] == next(iter(finals.values()))["weights"]
        # One that joined has, between loops, the values of the others; after a step the last ones.
        assert final["values"] == values[-len(final["values"]) :]
        assert where == "behind" or len(final["values"]) == EPOCHS
    for lines in job.said("committed").values():
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps))


def test_a_loss_in_an_unguarded_validation_ends_all_workers_with_an_explanation(
    tmp_path,
):
    job = Epochs(tmp_path, "unguarded")
    (job.said_folder / "die").touch()
    with job.cluster:
        node = job.cluster.start("a")
        job.cluster.wait(lambda: not node.is_alive, "the job ends")
    assert job.cluster.events("job-ended")[-1].data["ok"] is True
    said = "".join(path.read_text() for path in job.cluster.log_dir.glob("**/stderr.log"))
    lines = [line for line in said.splitlines() if "[job-given-up]" in line]
    assert lines
    for line in lines:
        assert f"gives up its state after {PER_EPOCH} steps" in line
        assert "from what the Checkpointer finds" in line and "job.retry(function, ...)" in line
