"""Sinks that are the services of other packages: Weights & Biases, MLflow and trackio.

Each is written by a process of its own (`sink_process`), which imports the package. A service that
hangs, fails or is absent therefore never blocks a step, and nothing that the package starts
outlives the worker. A sink keeps its newest values until that process has written them. It starts
the process again after a failure, and reports the failure once. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastane.process import environment
from elastane.worker.sink_process import KEPT_MAX, Scalars, kill_descendants

# A process that has taken no value for this long is ended, and started again.
HANG_S = 60.0
# Pauses between two tries of a sink that fails: the first, and the longest.
RETRY_FIRST_S, RETRY_MAX_S = 2.0, 60.0
_READ_BYTES = 1 << 16
_LOOK_S = 0.1


class ServiceSink:
    """A sink that a process of its own writes; use one of its subclasses.

    `key` identifies the run, which only one process may write at a time. `settings` are for that
    process.
    """

    kind = ""

    def __init__(self, key: str, settings: Mapping[str, Any]) -> None:
        self.path = f"{type(self).__name__}({key})"
        self._spec = {"kind": self.kind, "key": f"{self.kind}:{key}", **settings}
        # The newest entries. Those up to `_through` were written, and are kept since the service
        # may not have them if it dies.
        self._kept: deque[tuple[int, Scalars]] = deque()
        self._number = self._through = self._lost = 0
        self._process: _Process | None = None
        self._leaving: list[_Process] = []
        self._retry_at_s, self._retry_s = 0.0, RETRY_FIRST_S
        self._is_told = False

    def open(self, after_step: int | None) -> Mapping[str, int]:
        """Start the process. It asks the service for its last steps, so nothing is returned."""
        self._spec.update(self._named(uuid.uuid4().hex[:8] if after_step is None else None))
        self._kept.clear()
        self._through, self._retry_at_s = self._number, 0.0
        self._advance()
        return {}

    def write(self, scalars: Scalars) -> None:
        """Hand values to the process; never blocks."""
        self._number += 1
        self._kept.append((self._number, scalars))
        if len(self._kept) > KEPT_MAX:
            number, _ = self._kept.popleft()
            self._lost += number > self._through
        self._advance()

    def close(self) -> None:
        """Let the process write the entries that it has, and end; returns at once."""
        if self._process is not None:
            self._process.leave(is_end=False)
            self._leaving.append(self._process)
            self._process = None
        self._kept.clear()

    def finish(self, until_s: float) -> None:
        """Wait until all is written and all processes have ended, at most until then (monotonic).

        A process that needs longer is killed, and the values that it had not written are reported.
        """
        if self._process is not None or self._left():
            while self._left() and (left_s := until_s - time.monotonic()) > 0:
                if self._process is None:
                    time.sleep(min(_LOOK_S, left_s))
                else:
                    self._process.wait(min(_LOOK_S, left_s))
                self._advance()
            if self._left():
                self._report("the worker ends", "are lost")
        leaving, self._leaving = self._leaving, []
        if self._process is not None:
            self._process.leave(is_end=True)
            leaving.append(self._process)
            self._process = None
        self._kept.clear()
        for process in leaving:
            process.end(until_s)

    def _named(self, begin: str | None) -> Mapping[str, Any]:
        """Return the settings that name the run; `begin`: a new run begins, under this name."""
        return {"begin": begin}

    def _left(self) -> int:
        """Return the number of kept entries that are not written."""
        return min(len(self._kept), self._number - self._through)

    def _advance(self) -> None:
        """Read the reports of the process, start it when due, and send what its pipe accepts."""
        now_s = time.monotonic()
        self._leaving = [one for one in self._leaving if not one.has_ended()]
        process = self._process
        if process is not None:
            for report in process.reports():
                self._take(report.get("through", 0))
            if process.error or process.has_ended() or process.silent_s(now_s) > HANG_S:
                self._fail(process, now_s)
        if self._process is None and now_s >= self._retry_at_s:
            self._start(now_s)
        if self._process is not None:
            self._process.send(self._kept, now_s, is_waiting=bool(self._left()))

    def _take(self, through: int) -> None:
        """Note that the process has written up to this entry."""
        if through <= self._through:
            return
        self._through, self._retry_s = through, RETRY_FIRST_S
        if self._is_told:
            self._is_told = False
            sys.stderr.write(
                f"elastane: job.log: {self.path} is written again; {self._lost} entries are lost\n"
            )
            self._lost = 0

    def _start(self, now_s: float) -> None:
        try:
            self._process = _Process(self._spec, now_s)
        except OSError as error:
            self._put_off(str(error), now_s)

    def _fail(self, process: _Process, now_s: float) -> None:
        reason = process.error or f"nothing was written for {HANG_S:.0f} s"
        if process.has_ended() and not process.error:
            reason = f"its process ended with {process.exit_code()}"
        process.kill()
        self._process = None
        self._put_off(reason, now_s)

    def _put_off(self, reason: str, now_s: float) -> None:
        """Start the process later; report the first failure only."""
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        if not self._is_told:
            self._is_told = True
            self._report(reason, "are kept, and it is tried again")

    def _report(self, reason: str, then: str) -> None:
        sys.stderr.write(
            f"elastane: job.log: {self.path} cannot be written: {reason};"
            f" {self._left()} entries (at most {KEPT_MAX}) {then} [job-log]\n"
        )


class _FolderSink(ServiceSink):
    """A sink whose run is named in a file of its folder."""

    def __init__(self, folder: str | os.PathLike[str], key: str, **settings: Any) -> None:
        self._folder = Path(folder).absolute()
        super().__init__(f"{self._folder}{key}", {"folder": str(self._folder), **settings})

    def _named(self, begin: str | None) -> Mapping[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"elastane-{self.kind}.json"
        if begin is None and path.exists():
            return {"run": str(json.loads(path.read_text())["run"])}
        name = begin or uuid.uuid4().hex[:8]
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"run": name}))
        new.replace(path)
        return {"run": name}


class WandB(_FolderSink):
    """A run of Weights & Biases; needs the package wandb.

    `folder`: where wandb keeps its files, which all nodes reach; `elastane-wandb.json` in it has
    the run's id, by which another worker continues it. `settings`: further arguments of
    `wandb.init`, such as project, name and mode="offline".
    """

    kind = "wandb"

    def __init__(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__(folder, "", init=settings)


class MLflow(ServiceSink):
    """A run of MLflow; needs the package mlflow or mlflow-skinny.

    `tracking_uri`: a server, or a store that all nodes reach; the default is MLFLOW_TRACKING_URI.
    The run has the tag `elastane.job`, by which another worker finds and continues it.
    """

    kind = "mlflow"

    def __init__(
        self, tracking_uri: str = "", *, experiment: str = "elastane", run_name: str = ""
    ) -> None:
        job = environment.get("ELASTANE_JOB") or "elastane"
        settings = {
            "uri": tracking_uri or environment.get("MLFLOW_TRACKING_URI"),
            "experiment": experiment,
            "run_name": run_name or job,
            "job": job,
        }
        super().__init__(f"{settings['uri']}, {experiment}", settings)


class Trackio(_FolderSink):
    """A run of trackio in its local store; needs the package trackio.

    `folder`: its store (TRACKIO_DIR), which all nodes reach; `elastane-trackio.json` in it has the
    run's name, by which another worker continues it.
    """

    kind = "trackio"

    def __init__(self, folder: str | os.PathLike[str], *, project: str = "elastane") -> None:
        super().__init__(folder, f", {project}", project=project)


class _Process:
    """A running `sink_process`, with the pipes to and from it."""

    def __init__(self, spec: Mapping[str, Any], now_s: float) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastane.worker.sink_process", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**environment.snapshot(), "PYTHONPATH": paths},
            # Signals to the worker's process group must not reach it: it ends after the worker.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        os.set_blocking(self._from.fileno(), False)
        self._sent = 0
        self._outgoing = self._incoming = b""
        self._heard_s = now_s
        self._waits = False
        self.error = ""

    def send(self, entries: deque[tuple[int, Scalars]], now_s: float, *, is_waiting: bool) -> None:
        """Send entries as far as the pipe takes them; `is_waiting`: some are not written yet."""
        if not self._waits:
            self._heard_s = now_s
        self._waits = is_waiting
        if entries and entries[-1][0] == self._sent and not self._outgoing:
            return
        for number, one in entries:
            if number > self._sent and len(self._outgoing) < _READ_BYTES:
                line = [number, one.step, one.time_s, dict(one.values)]
                self._outgoing += json.dumps(line).encode() + b"\n"
                self._sent = number
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._to.fileno(), self._outgoing) :]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing = b""  # It has ended, which `has_ended` shows.

    def reports(self) -> list[dict[str, Any]]:
        """Return what the process has reported since the last call."""
        try:
            while some := os.read(self._from.fileno(), _READ_BYTES):
                self._incoming += some
        except OSError:
            pass
        *lines, self._incoming = self._incoming.split(b"\n")
        found = [json.loads(line) for line in lines]
        if found:
            self._heard_s = time.monotonic()
            self.error = found[-1].get("error", "")
        return found

    def wait(self, for_s: float) -> None:
        """Wait until the process reports something, or has ended."""
        select.select([self._from], [], [], for_s)

    def silent_s(self, now_s: float) -> float:
        """Return for how long the process has reported nothing, though it had entries."""
        return now_s - self._heard_s if self._waits else 0.0

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def leave(self, *, is_end: bool) -> None:
        """Let it write what it has, and end; `is_end`: the run is complete."""
        self._flush()
        if not self._outgoing and is_end:
            self._outgoing = b"end\n"
            self._flush()
        self._to.close()

    def end(self, until_s: float) -> None:
        """Wait until it has ended, and kill it then."""
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()) + 1.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._from.close()

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        kill_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()
