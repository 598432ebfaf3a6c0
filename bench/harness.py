"""One job under one launcher on this machine: start nodes, read steps, inject faults, end it.

Rows (the other files of this folder) are functions of a launcher that return a `Sample`. This file
runs a node under torchrun, under elastane or under no launcher, and parses its workers' output.
Every process of a job is killed at its end, including orphans, because each inherits a variable
with the job's mark.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

SCRIPT = Path(__file__).parent / "scripts" / "step.py"
CAP_S = 60.0  # a job that has not recovered by then counts as "never"
START_CAP_S = 120.0
POLL_S = 0.002


class BenchError(Exception):
    """A job did not reach the state in which the measurement begins."""


@dataclass(frozen=True)
class Launcher:
    """A way to start a node: its name in the table, its command, its part of the environment."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def is_elastane(self) -> bool:
        return "elastane" in self.command


TORCHRUN = Launcher("torchrun", (sys.executable, "-m", "torch.distributed.run"))
# A user's workaround for torchrun's shared store, with which by default a job never recovers.
TORCHRUN_UNSHARED = Launcher(
    "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    TORCHRUN.command,
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
ELASTANE = Launcher("elastane", (sys.executable, "-m", "elastane", "run"))
NO_LAUNCHER = Launcher("no launcher", ())


@dataclass(frozen=True)
class Line:
    """One line of a worker's output; see scripts/step.py."""

    at: float
    node: str
    rank: int
    pid: int
    world_size: int
    restart_count: int
    what: str
    step: int


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds, or None for never; repeated steps; a note."""

    seconds: float | None
    redone: int | None = None
    note: str = ""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def tree_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    pids = [pid]
    for child in children_of(pid):
        pids += tree_of(child)
    return pids


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@dataclass
class Node:
    """One agent: its name, address, network namespace and process."""

    name: str
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        # With a namespace, `ip netns exec` execs the command, so there is one pid.
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class BenchJob:
    """A folder, an endpoint, and the started nodes; a context manager that cleans up."""

    def __init__(self, launcher: Launcher, *, mode: str = "plain", script_args: str = "") -> None:
        self.launcher = launcher
        self.mode = mode
        self.script_args = script_args.split()
        self.folder = Path()
        self.port = 0
        self.marker = f"elastane-bench-{uuid.uuid4().hex}"
        self.nodes: list[Node] = []
        self._read_to = 0
        self._lines: list[Line] = []

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="elastane-bench-"))
        self.port = free_port()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop_all()
        if kind is None or not issubclass(kind, BenchError):
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, node: Node, flags: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Start an agent (or, without a launcher, a worker) with the bench's script."""
        script = [str(SCRIPT), "--dir", str(self.folder), "--mode", self.mode, *self.script_args]
        if self.launcher is NO_LAUNCHER:
            script = [sys.executable, *script]
        log = (self.folder / f"agent.{node.name}.{len(self.nodes)}.log").open("wb")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCH_NODE": node.name,
            "BENCH_JOB": self.marker,
            **self.launcher.env,
            **(env or {}),
        }
        with log:
            node.process = subprocess.Popen(
                [*node.prefix, *self.launcher.command, *flags, *script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.nodes.append(node)

    def lines(self) -> list[Line]:
        """Return all lines of the workers so far, in the order of writing."""
        path = self.folder / "steps.txt"
        if path.exists():
            with path.open() as file:
                file.seek(self._read_to)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read_to += len(whole)
            self._lines += [parse(line) for line in whole.splitlines()]
        return self._lines

    def steps(self, node: str | None = None) -> list[Line]:
        """Return the lines of completed steps, of one node or of all."""
        return [line for line in self.lines() if line.what == "step" and node in (None, line.node)]

    def wait_for(self, condition: Callable[[], bool], what: str, cap_s: float) -> None:
        """Wait until the condition holds; raises BenchError if it does not in time."""
        if not wait_until(condition, cap_s):
            raise BenchError(f"{self.launcher.name}: no {what} within {cap_s:g} s\n{self.tail()}")

    def wait_training(self, world_size: int, steps: int = 25) -> None:
        """Wait until a world of this size has completed this many steps."""

        def trained() -> bool:
            done = [line for line in self.steps() if line.world_size == world_size]
            ranks = {line.rank for line in done}
            return len(ranks) == world_size and len(done) >= steps * world_size

        self.wait_for(trained, f"{steps} steps in a world of {world_size}", START_CAP_S)

    def pid_of(self, node: str, rank: int) -> int:
        """Return the pid of the worker that last completed a step as this rank on this node."""
        return next(ln.pid for ln in reversed(self.steps()) if (ln.node, ln.rank) == (node, rank))

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of every agent's output, and the folder of the rest."""
        parts = [f"kept: {self.folder}"]
        for log in sorted(self.folder.glob("agent.*.log")):
            last = log.read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- {log.name}", *last]
        return "\n".join(parts)

    def stop_all(self) -> None:
        """SIGKILL every process of this job, including orphans, until none is left."""
        while pids := marked(self.marker):
            kill(pids)
            for node in self.nodes:
                if node.process is not None:
                    node.process.poll()
            time.sleep(POLL_S)


def marked(marker: str) -> list[int]:
    """Return the processes with a marker in their environment; zombies have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def parse(text: str) -> Line:
    """Parse one line of steps.txt."""
    at, node, rank, pid, world_size, restarts, what, step = text.split()
    return Line(
        float(at), node, int(rank), int(pid), int(world_size), int(restarts), what, int(step)
    )


def wait_until(condition: Callable[[], bool], cap_s: float) -> bool:
    """Poll a condition; return whether it held in time."""
    deadline = time.monotonic() + cap_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def recovery_after(
    job: BenchJob,
    at: float,
    *,
    node: str | None = None,
    world_size: int | None = None,
    cap_s: float,
) -> Sample:
    """Measure from `at` to the first step of a worker that had completed none before.

    `node` limits this to workers of one node, `world_size` to worlds of that size. Repeated steps
    are counted.
    """
    old = {line.pid for line in job.steps() if line.at <= at}

    def first() -> Iterator[Line]:
        return (
            line
            for line in job.steps(node)
            if line.pid not in old and world_size in (None, line.world_size)
        )

    if not wait_until(lambda: any(first()), cap_s):
        return Sample(None)
    new = next(iter(first()))
    done = max(line.step for line in job.steps() if line.pid in old)
    return Sample(new.at - at, redone=done - new.step + 1)
