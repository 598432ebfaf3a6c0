"""`job.log` in real jobs: each value reaches the sinks once, whichever worker is killed."""

import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from jobs import until

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "scalars.py"
DEADLINE_S = 90.0


class Logged:
    """A job of one node whose workers log, and their logged values."""

    def __init__(self, folder, steps, *services, **options):
        self.folder, self.steps = folder, steps
        self.cluster = LocalCluster(
            [str(SCRIPT), str(folder), str(steps), *services], folder=folder / "job", nnodes="1",
            preload="torch,torch.distributed,torch.optim", max_restarts=10, **options,
        )  # fmt: skip

    def progress(self):
        """Return the number of steps of each worker, by rank and pid."""
        found = {}
        for path in self.folder.glob("up.*"):
            _, rank, pid = path.name.split(".")
            found[int(rank), int(pid)] = int(path.read_text() or 0)
        return found

    def writer(self):
        """Return the pid of the worker with the open file of scalars."""
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(path) == str(self.folder / "scalars.jsonl"):
                    return int(path.parts[2])
            except OSError:
                continue
        return None

    def writer_but(self, others):
        """Wait until another worker than these writes, and return its pid."""
        found = []
        until(
            lambda: found.append(self.writer()) or found[-1] not in (None, *others),
            "another writes",
            DEADLINE_S,
        )
        return found[-1]

    def enough(self):
        """Let the job make its last step."""
        (self.folder / "enough").touch()

    def wait_step(self, step):
        until(lambda: max(self.progress().values(), default=0) >= step, f"step {step}", DEADLINE_S)

    def lines(self):
        return [json.loads(line) for line in (self.folder / "scalars.jsonl").open()]

    def expected(self):
        """Return the steps of each name."""
        return {
            "weight": [*range(1, self.steps + 1)],
            "members": [*range(1, self.steps + 1)],
            "tenth": [*range(10, self.steps + 1, 10)],
            "final": [self.steps],
        }

    def check(self):
        """Assert that each name has each step once in both sinks, with one training's values."""
        expected = self.expected()
        lines = self.lines()
        for name, steps in expected.items():
            found = [line["step"] for line in lines if name in line]
            assert found == steps, (name, {*steps} - {*found}, [*(Counter(found) - Counter(steps))])
        assert all(line["tenth"] == line["step"] for line in lines if "tenth" in line)
        board = on_board(self.folder / "board")
        for name, steps in expected.items():
            found = [step for step, _ in board[name]]
            assert found == steps, (name, {*steps} - {*found}, [*(Counter(found) - Counter(steps))])
        [shown] = (self.folder / "job").glob("**/scalars.*.jsonl")
        assert json.loads(shown.open().readline())["step"] == 1, "the job's page shows it"
        weights = {line["step"]: line["weight"] for line in lines if "weight" in line}
        assert dict(board["weight"]) == pytest.approx(weights, rel=1e-5)
        return weights


def on_board(folder):
    """Return what TensorBoard shows of a folder: steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = shown.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in shown.Scalars(tag)] for tag in tags}


def in_wandb(folder):
    """Return the steps by name in all files of a run of Weights & Biases; there is one run."""
    from elastane.worker.sink_process import wandb_rows

    found = {}
    files = [*folder.glob("wandb/wandb/offline-run-*/run-*.wandb")]
    assert len({path.name for path in files}) == 1
    for row in (row for path in sorted(files) for row in wandb_rows(path)):
        for name in row:
            found.setdefault(name, []).append(row["step"])
    return found


def in_mlflow(folder):
    """Return the steps by name in the one run of MLflow."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file://{folder}/mlflow")
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [one.step for one in some] for name, some in history.items()}


def in_trackio(folder):
    """Return the steps by name in the one run of trackio."""
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_run_records("digits")
    found = {}
    for row in SQLiteStorage.get_logs("digits", run["name"]):
        for name in row:
            found.setdefault(name, []).append(row["step"])
    return found


READERS = {"wandb": in_wandb, "mlflow": in_mlflow, "trackio": in_trackio}


def test_each_value_is_logged_once_though_the_writer_is_killed_again_and_again(tmp_path):
    job = Logged(tmp_path, 150, nproc_per_node=3, in_place=True)
    with job.cluster as cluster:
        node = cluster.start("a")
        writers = []
        for step in (15, 40, 65):
            job.wait_step(step)
            writers.append(job.writer_but(writers))
            os.kill(writers[-1], signal.SIGKILL)
            cluster.wait_event("replacement", count=len(writers))
        job.enough()
        cluster.wait_done(DEADLINE_S)
        assert node.wait(DEADLINE_S) == 0
        assert len(cluster.events("replacement")) == 3
    job.check()


def test_steps_that_are_made_again_after_a_restart_of_all_are_logged_once(tmp_path):
    job = Logged(tmp_path, 60, nproc_per_node=2, in_place=True)
    with job.cluster as cluster:
        cluster.start("a")
        job.wait_step(25)
        for (_, pid), _ in job.progress().items():
            os.kill(pid, signal.SIGKILL)
        job.enough()
        cluster.wait_done(DEADLINE_S)
    job.check()


@pytest.mark.soak
@pytest.mark.parametrize("service", READERS)
def test_a_real_service_gets_each_value_once_though_its_writers_are_killed(
    tmp_path, monkeypatch, service
):
    # trackio reads it as it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip(service)
    job = Logged(tmp_path, 600, service, nproc_per_node=3, in_place=True)
    with job.cluster as cluster:
        node = cluster.start("a")
        writers = []
        for step in (100, 250):
            job.wait_step(step)
            writers.append(job.writer_but(writers))
            os.kill(writers[-1], signal.SIGKILL)
            cluster.wait_event("replacement", count=len(writers))
        job.enough()
        cluster.wait_done(2 * DEADLINE_S)
        assert node.wait(DEADLINE_S) == 0
        assert len(cluster.events("replacement")) == 2
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_of_service(path, tmp_path)]
    assert not left
    found = READERS[service](tmp_path)
    for name, steps in job.expected().items():
        assert sorted(found[name]) == steps, (name, Counter(found[name]) - Counter(steps))


def is_of_service(path, folder):
    """Whether a process writes to a service for a job in this folder, or was started for that."""
    with contextlib.suppress(OSError):
        line, environ = path.read_bytes(), (path.parent / "environ").read_bytes()
        is_one = b"sink_process" in line or b"wandb-core" in line
        return is_one and str(folder).encode() in environ + line
    return False
