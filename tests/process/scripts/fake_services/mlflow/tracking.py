"""A client that keeps each run in a file; it starts a process that would outlive it."""

import contextlib
import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

from .entities import Metric


class MlflowClient:
    """The part of MLflow's client that elastane uses."""

    def __init__(self, uri):
        self.folder = Path(uri)
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with (self.folder / "pids").open("a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")

    def _meet_faults(self):
        while (self.folder / "hang").exists():
            time.sleep(0.01)
        if (self.folder / "refuse").exists():
            raise RuntimeError("the server is away")

    def get_experiment_by_name(self, name):
        self._meet_faults()
        return SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, which, max_results, order_by):
        assert (max_results, order_by) == (1, ["attributes.start_time DESC"])
        tag, _, value = which.partition(" = ")
        tag, value = tag.removeprefix("tags.").strip("`"), json.loads(value)
        files = sorted(self.folder.glob("run-*.jsonl"), reverse=True)
        runs = [path for path in files if json.loads(path.open().readline())[tag] == value]
        return [self._run(path) for path in runs[:1]]

    def create_run(self, experiment, tags, run_name):
        path = self.folder / f"run-{time.time_ns()}.jsonl"
        path.write_text(json.dumps(tags) + "\n")
        return self._run(path)

    def _run(self, path):
        return SimpleNamespace(
            info=SimpleNamespace(run_id=path.name, status="RUNNING"),
            data=SimpleNamespace(metrics={one.key: one.value for one in self._metrics(path)}),
        )

    def _metrics(self, path):
        return [Metric(*json.loads(line)) for line in path.read_text().splitlines()[1:]]

    def get_metric_history(self, run, name):
        return [one for one in self._metrics(self.folder / run) if one.key == name]

    def log_batch(self, run, metrics):
        if (database := self.folder / "runs.db").exists():
            rows = [(one.step,) for one in metrics]
            with contextlib.closing(sqlite3.connect(database, timeout=0.5)) as store, store:
                store.executemany("insert into logged values (?)", rows)
        self._meet_faults()
        with (self.folder / run).open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in metrics))

    def set_terminated(self, run):
        (self.folder / "terminated").write_text(run)
