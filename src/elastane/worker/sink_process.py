"""The process that writes one service for `job.log`: `python -m elastane.worker.sink_process SPEC`.

It reads entries from its standard input and reports on its standard output which are written. It
asks the service itself for the last step of each name, so entries that come twice are left out.
When the input ends, which the death of the worker does as well, it writes what it has read and
ends within a deadline, with all processes that the package has started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from elastane.process.kernel import become_subreaper

# A worker that dies leaves one or two steps unwritten; a sink that is away for a while, more.
KEPT_MAX = 1024
# The time to write once the input has ended: a hanging service must not delay the job's end.
END_WITHIN_S = 30.0
# Values logged between steps join those of the step before them, if they come within this time.
_ROW_OPEN_S = 1.0
# How long the process of a former writer may still write; its end is bounded by END_WITHIN_S.
_LOCK_WITHIN_S = 2 * END_WITHIN_S
_LOOK_S = 1.0
_BATCH_ROWS_MAX = 200
# MLflow refuses more metrics in one request.
_BATCH_METRICS_MAX = 1000
_ERROR_CHARACTERS_MAX = 500


class Scalars(NamedTuple):
    """The values that were logged after `step` committed steps, at a wall clock time."""

    step: int
    time_s: float
    values: Mapping[str, float]


class Service(Protocol):
    """A package, as this process uses it."""

    def open(self) -> Mapping[str, int]:
        """Continue the run, or begin it; return the last step that it has of each name."""

    def write(self, rows: list[Scalars]) -> None:
        """Write rows, each of another step."""

    def close(self, *, is_end: bool) -> None:
        """Flush and close; `is_end`: the job has ended."""


class WandBService:
    """Weights & Biases, online or offline.

    wandb-core holds back what it has not written to its file yet, so after a death the files say
    what is there, not what was logged.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._folder, self._init = Path(spec["folder"]), spec["init"]
        self._id = self._init.get("id") or spec["run"]
        self._run: Any = None

    def open(self) -> Mapping[str, int]:
        """Open the run by its id."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, int] = {}
        for path in self._folder.glob(f"wandb/*run-*-{self._id}/run-{self._id}.wandb"):
            for row in wandb_rows(path):
                step = int(row.get("step", row.get("_step", 0)))
                found.update({name: max(step, found.get(name, 0)) for name in row})
        settings = wandb.Settings(silent=True, console="off")
        choices = {"resume": "allow", "settings": settings, **self._init}
        self._run = wandb.init(**{**choices, "id": self._id, "dir": str(self._folder)})
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        # Online the service knows the last row, also that of a node with other files.
        return {**found, "": self._run.step - 1}

    def write(self, rows: list[Scalars]) -> None:
        """Log each row at its step; wandb refuses a step below its last one."""
        for one in rows:
            row = {**one.values, "step": one.step}
            self._run.log(row, step=max(one.step, self._run.step), commit=True)

    def close(self, *, is_end: bool) -> None:
        """Finish the run, which waits for wandb-core."""
        import wandb

        self._run.finish()
        wandb.teardown()


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .wandb file: a log of LevelDB after a header of seven bytes.

    A file that was cut off ends with its last whole record.
    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data) or not kind:
            return
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            read = wandb_internal_pb2.Record.FromString(record)
            if read.HasField("history"):
                items = read.history.item
                yield {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}


class MLflowService:
    """MLflow, through its client."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._client: Any = None
        self._run = ""

    def open(self) -> Mapping[str, int]:
        """Find the run by its tag, or create it."""
        from mlflow.tracking import MlflowClient

        spec = self._spec
        self._client = client = MlflowClient(spec["uri"] or None)
        experiment = client.get_experiment_by_name(spec["experiment"])
        number = experiment and experiment.experiment_id
        number = number or client.create_experiment(spec["experiment"])
        tag, value = ("run", spec["begin"]) if spec["begin"] else ("job", spec["job"])
        which, order = f"tags.`elastane.{tag}` = {json.dumps(value)}", "attributes.start_time DESC"
        runs = client.search_runs([number], which, max_results=1, order_by=[order])
        if not runs:
            tags = {"elastane.job": spec["job"], "elastane.run": spec["begin"] or ""}
            runs = [client.create_run(number, tags=tags, run_name=spec["run_name"])]
        self._run = runs[0].info.run_id
        if runs[0].info.status != "RUNNING":
            client.update_run(self._run, status="RUNNING")
        names = runs[0].data.metrics
        return {name: self._last_of(name) for name in names}

    def _last_of(self, name: str) -> int:
        history = self._client.get_metric_history(self._run, name)
        return max((one.step for one in history), default=-1)

    def write(self, rows: list[Scalars]) -> None:
        """Log the rows in as few requests as MLflow accepts."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(one.time_s * 1000), one.step)
            for one in rows
            for name, value in one.values.items()
        ]
        for begin in range(0, len(metrics), _BATCH_METRICS_MAX):
            some = metrics[begin : begin + _BATCH_METRICS_MAX]
            self._client.log_batch(self._run, metrics=some)

    def close(self, *, is_end: bool) -> None:
        """Mark the run as finished, if the job has ended."""
        if is_end:
            self._client.set_terminated(self._run)


class TrackioService:
    """trackio, with its local store."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._project = spec["project"]
        self._folder = Path(spec["folder"])
        self._name = spec["run"]
        self._run: Any = None

    def open(self) -> Mapping[str, int]:
        """Open the run by its name."""
        os.environ["TRACKIO_DIR"] = str(self._folder)
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, int] = {}
        for row in SQLiteStorage.get_logs(self._project, self._name):
            found.update({name: max(row["step"], found.get(name, 0)) for name in row})
        self._run = trackio.init(
            self._project,
            self._name,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return found

    def write(self, rows: list[Scalars]) -> None:
        """Log the rows; a thread of trackio writes them within half a second."""
        for one in rows:
            self._run.log(dict(one.values), step=one.step)

    def close(self, *, is_end: bool) -> None:
        """Wait until trackio's thread has written all."""
        self._run.finish()


SERVICES: dict[str, Callable[[Mapping[str, Any]], Service]] = {
    "wandb": WandBService,
    "mlflow": MLflowService,
    "trackio": TrackioService,
}


class Input:
    """The entries from the worker; a thread reads them, so that their end is always noticed."""

    def __init__(self) -> None:
        self.is_end = False
        self._entries: queue.Queue[tuple[int, Scalars] | None] = queue.Queue()
        self._parent = os.getppid()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch_parent, daemon=True).start()

    def _read(self) -> None:
        # The worker has at most KEPT_MAX entries underway, which bounds the queue.
        for line in sys.stdin.buffer:
            if line == b"end\n":
                self.is_end = True
            elif line.endswith(b"\n"):
                number, step, time_s, values = json.loads(line)
                self._entries.put((number, Scalars(step, time_s, values)))
        self._ended()

    def _watch_parent(self) -> None:
        """Notice the worker's death though a child of it holds the other end of the pipe."""
        while os.getppid() == self._parent:
            time.sleep(_LOOK_S)
        self._ended()

    def _ended(self) -> None:
        self._entries.put(None)
        timer = threading.Timer(END_WITHIN_S, _exit, (1,))
        timer.daemon = True
        timer.start()

    def take(self) -> tuple[list[tuple[int, Scalars]], bool]:
        """Wait a moment for entries; return them, and whether these are the last ones."""
        taken: list[tuple[int, Scalars]] = []
        wait_s = _ROW_OPEN_S
        while len(taken) < _BATCH_ROWS_MAX:
            try:
                one = self._entries.get(timeout=wait_s)
            except queue.Empty:
                break
            if one is None:
                return taken, True
            taken.append(one)
            wait_s = 0.0 if len(taken) > 1 else 0.01
        return taken, False


class Rows:
    """Makes one row for each step, without the values that the service already has."""

    def __init__(self, found: Mapping[str, int]) -> None:
        self._floor = found.get("", -1)
        self._written = dict(found)
        self._open: Scalars | None = None
        # The last entry, and the last one whose values are in complete rows.
        self._number = self._complete = 0

    def add(self, number: int, one: Scalars) -> Scalars | None:
        """Add an entry; return the row before it, if that is complete now."""
        before, self._number = self._number, number
        last, missing = self._written, {}
        for name, value in one.values.items():
            if one.step > max(self._floor, last.get(name, -1)):
                missing[name] = value
                last[name] = one.step
        complete = None
        if missing and self._open is not None and self._open.step == one.step:
            self._open = self._open._replace(values={**self._open.values, **missing})
        elif missing:
            complete, self._open = self._open, one._replace(values=missing)
            self._complete = before
        return complete

    def rest(self) -> list[Scalars]:
        """Return the last row, which gets no further values."""
        rest, self._open = self._open, None
        return [rest] if rest is not None else []

    @property
    def through(self) -> int:
        """The number of the last entry that the returned rows have."""
        return self._number if self._open is None else self._complete


def run(spec: Mapping[str, Any], report: Callable[[Mapping[str, Any]], None]) -> None:
    """Write what comes from the standard input, until it ends."""
    entries = Input()
    with _alone(spec["key"]):
        service = SERVICES[spec["kind"]](spec)
        rows = Rows(service.open())
        report({"opened": True})
        is_last = False
        while not is_last:
            taken, is_last = entries.take()
            complete = [row for number, one in taken if (row := rows.add(number, one))]
            if is_last or not taken:
                complete += rows.rest()
            if complete:
                service.write(complete)
            report({"through": rows.through})
        service.close(is_end=entries.is_end)


@contextlib.contextmanager
def _alone(key: str) -> Iterator[None]:
    """Wait until no other process of this host writes this run; raises TimeoutError."""
    name = f"elastane-sink-{os.getuid()}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    until_s = time.monotonic() + _LOCK_WITHIN_S
    # The kernel frees an abstract address as its process ends.
    with socket.socket(socket.AF_UNIX) as held:
        while True:
            try:
                held.bind(f"\0{name}")
                break
            except OSError as error:
                if time.monotonic() > until_s:
                    raise TimeoutError("another process still writes it") from error
            time.sleep(0.05)
        yield


def _exit(code: int) -> NoReturn:
    """End this process and all that it has started."""
    kill_descendants(os.getpid())
    os._exit(code)


def kill_descendants(pid: int) -> None:
    """Kill what a process has started, which may be in sessions of its own."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                kill_descendants(child)
                os.kill(child, signal.SIGKILL)


def main() -> NoReturn:
    """Run; at the end, also after an error, kill all processes that were started."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    become_subreaper()
    # Output of packages is no report; their errors go to the worker's error output.
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def report(what: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(out, json.dumps(what).encode() + b"\n")

    spec = json.loads(sys.argv[1])
    try:
        run(spec, report)
    except BaseException as error:
        text = " ".join(str(error).split())[:_ERROR_CHARACTERS_MAX]
        if isinstance(error, ModuleNotFoundError):
            text += f" (pip install 'elastane[{spec['kind']}]')"
        report({"error": f"{type(error).__name__}: {text}"})
        _exit(1)
    _exit(0)


if __name__ == "__main__":
    main()
