"""Real jobs for the tests of membership: agents as processes, a script that logs its steps.

A `Job` is a context that leaves no process behind. If a wait times out, it shows the output of each
agent and the event log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import warm_start
from polling import look
from ports import free_port

from elastane.observe.events import LoggedEvent, read_events
from elastane.process.files import process_start
from elastane.protocol.log_events import EventKind

SCRIPT = Path(__file__).parent / "scripts" / "member_steps.py"
LONE = SCRIPT.with_name("lone_coordinator.py")
# Generous: the bound of a test that fails, on a machine that does other things as well.
DEADLINE_S = 90.0
MARK = "TEST_MEMBERSHIP_MARK"
# What the step script imports; the default preload costs twice as much.
PRELOAD = "torch,torch.distributed"
# Of scripts that import scripts/uncompiled.py.
PRELOAD_OPTIMIZER = f"{PRELOAD},torch.optim"
# And what the first optimizer of the others imports in each worker: 1.8 s of processor time.
PRELOAD_COMPILER = f"{PRELOAD_OPTIMIZER},torch._dynamo"


@dataclass(frozen=True)
class Step:
    """One line that a worker wrote."""

    rank: int
    step: int
    world: int
    restarts: int
    round: int
    attempt: int
    node: str
    pid: int
    time_s: float


@dataclass
class Agent:
    """One agent, as a process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return its exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {self.name} still runs:\n{self.words}") from None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def words(self) -> str:
        """The output of the agent and its workers."""
        return self.log.read_text(errors="replace")

    @property
    def box(self) -> str:
        """The closing box as one line, without its frame; empty without a box."""
        _, corner, box = self.words.partition("╔")
        return " ".join(box.replace("║", " ").split()) if corner else ""


@dataclass
class Job:
    """One job of several agents on this machine."""

    folder: Path
    nnodes: str = "2"
    options: tuple[str, ...] = ()
    conf: str = ""
    mode: str = "plain"
    steps: int = 100_000
    name: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    port: int = field(default_factory=free_port)
    backend: str = "elastane"
    endpoint: str = ""
    program: tuple[str, ...] = ("-m", "elastane")
    agents: list[Agent] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = self.endpoint or f"127.0.0.1:{self.port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for agent in self.agents:
            if agent.is_alive:
                agent.process.kill()
                agent.process.wait()
        try:
            until(lambda: not left_over(self.mark), "no process of the job is left")
        finally:
            for pid, _ in left_over(self.mark):
                os.kill(pid, signal.SIGKILL)
        if error is not None and kind is not None and issubclass(kind, Exception):
            error.add_note(self.story())

    def start(
        self, node: str, *options: str, env: dict[str, str] | None = None, nproc: int = 1
    ) -> Agent:
        """Start an agent; later `options` win over the job's."""
        path = self.folder / f"{node}.{len(self.agents)}.log"
        with path.open("wb") as log:
            process = warm_start.Popen(
                self.command(node, nproc, options),
                env=self.environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        agent = Agent(node, process, path)
        self.agents.append(agent)
        return agent

    def start_coordinator(self) -> Agent:
        """Start a process that holds the coordinator and is no member."""
        words = self.command("lone", 1, ())
        words = [sys.executable, str(LONE), *words[words.index("run") + 1 :]]
        path = self.folder / "lone.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                words, env=self.environment({}), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.agents.append(Agent("lone", process, path))
        return self.agents[-1]

    def command(self, node: str, nproc: int, options: tuple[str, ...]) -> list[str]:
        meeting = ["--rdzv-backend", self.backend, "--rdzv-endpoint", self.endpoint]
        if self.backend == "static":
            meeting = ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        return [
            *(sys.executable, *self.program, "run"),
            *(*meeting, "--nnodes", self.nnodes, "--nproc-per-node", str(nproc)),
            *(("--rdzv-id", self.name) if self.name else ()),
            *("--node-id", node, "--log-dir", str(self.folder / "logs")),
            *(("--rdzv-conf", self.conf) if self.conf else ()),
            *(("--no-zygote",) if self.mode == "alone" else ("--preload", PRELOAD)),
            *("--shutdown-timeout", "5", *self.options, *options),
            *(str(SCRIPT), str(self.folder / "steps"), str(self.steps)),
        ]

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        kept = (
            "PATH",
            "HOME",
            "VIRTUAL_ENV",
            "PYTHONPATH",
            "TMPDIR",
            "LD_LIBRARY_PATH",
            "COVERAGE_PROCESS_CONFIG",
        )
        base = {name: os.environ[name] for name in kept if name in os.environ}
        return {**base, "OMP_NUM_THREADS": "1", MARK: self.mark, "MODE": self.mode, **more}

    def seen(self) -> list[Step]:
        """Return the steps so far, in the order in which they were written."""
        try:
            lines = (self.folder / "steps").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [_step(line) for line in lines if line.endswith("\n")]

    def wait(self, what: str, condition: Callable[[list[Step]], object]) -> list[Step]:
        """Wait until `condition` holds for the steps so far, and return those of that look."""
        seen: list[Step] = []

        def holds() -> object:
            seen[:] = self.seen()
            return condition(seen)

        until(holds, what)
        return seen

    def wait_step(
        self, *, world: int, fence: tuple[int, int] | None = None, count: int = 3
    ) -> Step:
        """Wait until the newest world has `world` workers, each of which did `count` steps in it.

        With `fence`, the world is not that one. Returns the newest step.
        """

        def is_there(seen: list[Step]) -> bool:
            last = newest(seen)
            now = {(s.rank, s.step) for s in last}
            return (
                bool(last)
                and last[0].world == world
                and (last[0].round, last[0].attempt) != fence
                and all(sum(r == rank for r, _ in now) >= count for rank in range(world))
            )

        return newest(self.wait(f"steps of a world of {world} after {fence}", is_there))[-1]

    def events(self, *kinds: EventKind) -> list[LoggedEvent]:
        """Return the events of these kinds, or all events."""
        found = read_events(self.folder / "logs" / self.name)
        return [event for event in found if not kinds or event.kind in kinds]

    def wait_event(self, kind: EventKind, words: str = "", count: int = 1) -> LoggedEvent:
        """Wait for the `count`-th event of that kind whose reason or node has `words`."""

        def found() -> list[LoggedEvent]:
            return [e for e in self.events(kind) if words in e.reason or words == e.node]

        until(lambda: len(found()) >= count, f"event {kind} with {words!r}")
        return found()[count - 1]

    def coordinator(self) -> Agent:
        """Return the agent in which the coordinator started last."""
        started = self.events(EventKind.COORDINATOR_STARTED)[-1]
        return next(a for a in self.agents if a.process.pid == started.pid)

    def story(self) -> str:
        """Return the output of all agents and the event log."""
        said = [f"--- {a.name} ({a.process.poll()})\n{a.words[-6000:]}" for a in self.agents]
        told = [f"{e.time} {e.source} {e.node} {e.kind}: {e.reason}" for e in self.events()]
        steps = [str(step) for step in self.seen()[-6:]]
        return "\n".join([*said, "--- events", *told, "--- steps", *steps])


def newest(seen: list[Step]) -> list[Step]:
    """Return the steps of the newest fence."""
    last = max(((s.round, s.attempt) for s in seen), default=(0, 0))
    return [s for s in seen if (s.round, s.attempt) == last]


def ranks(steps: list[Step]) -> dict[int, str]:
    """Return the node of each rank."""
    return {s.rank: s.node for s in sorted(steps, key=lambda s: s.rank)}


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for `condition`."""
    end = time.monotonic() + deadline_s
    while (pause_s := look(condition, 0.02)) is not None:
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause_s)


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return bool(process_start(pid))


def left_over(mark: str) -> list[tuple[int, str]]:
    """Return pid and command line of the processes that carry the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(folder.name), line))
        except OSError:
            continue
    return found


def _step(line: str) -> Step:
    words = line.split()
    return Step(*map(int, words[:6]), words[6], int(words[7]), float(words[8]))


def trains_on(job: Job, more: int = 10) -> None:
    """Assert that the workers of round 1 attempt 0 continue in the same processes."""
    pids = {s.pid for s in newest(job.seen())}
    job.wait_step(world=2, count=len(newest(job.seen())) // 2 + more)
    steps = newest(job.seen())
    assert {(s.round, s.attempt) for s in steps} == {(1, 0)}
    assert {s.pid for s in steps} == pids and len(pids) == 2
