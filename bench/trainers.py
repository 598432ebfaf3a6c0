"""One job on this machine that recovers in place: its processes, and the steps they committed.

Workers append a line for each committed step to FOLDER/PID.jsonl; a `Watch` reads the new lines of
all of them. It serves elastane (agents) and peers (any processes that write such lines). Every
process ends with the context, by the mark in its environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from bench.harness import BenchError, kill, marked

T = TypeVar("T")
DEADLINE_S = 60.0
SCRIPTS = Path(__file__).parent / "scripts"
# A worker that has stepped within this time belongs to the current world.
RECENT_S = 1.0


@dataclass(frozen=True)
class Commit:
    """One committed step, as one worker wrote it."""

    at_s: float
    step: int
    world: int
    round: int
    rank: int
    again: int = 0
    digest: str = ""


class Watch:
    """The committed steps of a folder's workers; reads each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.commits: dict[int, list[Commit]] = {}

    def poll(self) -> dict[int, list[Commit]]:
        """Return all lines so far, by pid."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            mine = self.commits.setdefault(int(path.stem), [])
            mine += [Commit(**json.loads(line)) for line in whole.splitlines()]
        return self.commits


class Trainers:
    """The processes of a job; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self.folder = Path()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._mark = f"elastane-bench-{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="elastane-bench-"))
        self.watch = Watch(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        while pids := marked(self._mark):
            kill(pids)
            for process in self.processes:
                process.poll()
            time.sleep(0.005)
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start a process with its output in the folder; return its pid."""
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), "BENCH_JOB": self._mark},
                start_new_session=True,
            )
        self.processes.append(process)
        return process.pid

    def start_agent(
        self, workers: int, *options: str, mode: str = "library", step_s: float = 0.0
    ) -> int:
        """Start an agent of elastane with workers that train for ever; return its pid."""
        script = [str(SCRIPTS / "in_place_train.py"), str(self.folder), mode, "0", str(step_s)]
        return self.start_script(workers, script, "--max-restarts", "100000", *options)

    def start_script(self, workers: int, script: Sequence[str], *options: str) -> int:
        """Start an agent of elastane with workers that run a script; return its pid."""
        words = ["--nproc-per-node", str(workers), "--min-workers", "1"]
        words += ["--rdzv-conf", "crash_loop=0,gather=0.2", "--log-dir", f"{self.folder}/logs"]
        return self.start([sys.executable, "-m", "elastane", "run", *words, *options, *script])

    def wait(self, condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
        """Return the first true value of `condition`; raises BenchError if it takes too long."""
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            if value := condition():
                return value
            time.sleep(0.002)
        raise BenchError(f"not within {deadline_s:g} s: {what}; kept: {self.folder}")

    def wait_world(self, workers: int) -> dict[int, Commit]:
        """Return the latest commit of each worker of a world, once all have just stepped in it."""
        return self.wait(lambda: self._world(workers), f"a world of {workers} workers")

    def _world(self, workers: int) -> dict[int, Commit]:
        now_s = time.monotonic()
        latest = {pid: done[-1] for pid, done in self.watch.poll().items() if done}
        here = {
            pid: last
            for pid, last in latest.items()
            if last.world == workers and now_s - last.at_s < RECENT_S
        }
        one = len({last.round for last in here.values()}) == 1
        return here if len(here) == workers and one else {}

    def next_step_s(self, pids: Collection[int], since_s: float, deadline_s: float) -> float:
        """Return the seconds until each of `pids` has committed a step in a later round."""
        what = f"the next step of {sorted(pids)}"
        return self.wait(lambda: self._next(pids, since_s), what, deadline_s)

    def _next(self, pids: Collection[int], since_s: float) -> float:
        said, firsts = self.watch.poll(), []
        for pid in pids:
            last = next(c.round for c in reversed(said[pid]) if c.at_s < since_s)
            later = next((c for c in said[pid] if c.round > last and c.at_s > since_s), None)
            if later is None:
                return 0.0
            firsts.append(later.at_s - since_s)
        return max(firsts)

    def judge(self) -> str:
        """Return whether any step was lost, or repeated by one process, from first to last."""
        said = self.watch.poll()
        for pid, done in said.items():
            numbers = [commit.step for commit in done]
            if numbers != sorted(set(numbers)):
                raise BenchError(f"process {pid} did a step twice: {numbers}")
        steps = sorted({commit.step for done in said.values() for commit in done})
        lost = len(range(steps[0], steps[-1] + 1)) - len(steps)
        return "no step lost" if not lost else f"{lost} steps lost"
