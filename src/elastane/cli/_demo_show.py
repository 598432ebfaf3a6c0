"""Runs the demo: starts real agents on this machine, injects the faults, and measures their cost.

Owns the processes and ends all of them, however the demo ends. It adopts orphans, and the kernel
kills the agents if the demo is killed; for that the demo must stay single-threaded. It follows the
job through its event log and through the progress file of its script.
"""

from __future__ import annotations

import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from elastane.cli._demo_story import (
    SLOW_DOWN,
    TITLES,
    Act,
    Cost,
    DemoDone,
    DemoPlan,
    PlannedAct,
    WorkerEnd,
    cost_of,
    is_to_slow_down,
    next_act,
)
from elastane.errors import WorkerFailedError
from elastane.observe.events import EventReader
from elastane.observe.view import (
    JobView,
    StepProgress,
    after_act,
    after_event,
    after_progress,
    decode_progress,
)
from elastane.process.kernel import become_subreaper, die_with_parent
from elastane.protocol.unreadable import UNREADABLE

WORKERS_PER_NODE = 2
# Processes end within milliseconds after SIGKILL; one that waits for a disk may take longer.
END_TIMEOUT_S = 5.0
REAP_POLL_S = 0.01


@dataclass
class Agent:
    """One node of the demo."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_end(self, lines: int = 30) -> str:
        """Return the last lines of the output of the agent and its workers."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class DemoCluster:
    """The agents of one job; a context that leaves no process behind."""

    def __init__(self, folder: Path, script: Sequence[str], environ: dict[str, str]) -> None:
        self.folder = folder
        self.job = f"demo-{os.getpid()}"
        self.log_dir = folder / "logs"
        self.agents: list[Agent] = []
        self._names = (f"node-{letter}" for letter in string.ascii_lowercase)
        self._script = list(script)
        self._environ = environ
        self._port = 0

    def __enter__(self) -> Self:
        become_subreaper()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        end_all_children()

    def next_name(self) -> str:
        """Return a name that no node has had."""
        return next(self._names)

    def start(self, name: str) -> Agent:
        """Start the agent of a node."""
        agent = self._launch(name, self._command(name))
        self.agents.append(agent)
        return agent

    def start_undisturbed(self, script: Sequence[str]) -> Agent:
        """Start a separate job that the demo leaves alone."""
        words = ["--standalone", "--nproc-per-node", str(WORKERS_PER_NODE)]
        words += ["--log-dir", str(self.log_dir)]
        command = [sys.executable, "-m", "elastane", "run", *words, *script]
        return self._launch("undisturbed", command)

    def _launch(self, name: str, command: Sequence[str]) -> Agent:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one thread
            )
        return Agent(name, process, log)

    def _command(self, name: str) -> list[str]:
        flags = {
            "--nnodes": "1:2",
            "--nproc-per-node": str(WORKERS_PER_NODE),
            "--min-workers": "1",
            "--max-restarts": "5",
            "--rdzv-endpoint": f"127.0.0.1:{self._port}",
            "--rdzv-id": self.job,
            "--node-id": name,
            "--local-addr": "127.0.0.1",
            "--log-dir": str(self.log_dir),
        }
        words = [word for flag in flags.items() for word in flag]
        return [sys.executable, "-m", "elastane", "run", *words, *self._script]

    def failed(self) -> Agent | None:
        """Return an agent that ended with an error, although the demo did not kill it."""
        return next((agent for agent in self.agents if agent.process.poll() not in (None, 0)), None)

    def all_done(self) -> bool:
        """Say whether every agent has ended with success."""
        return all(agent.process.poll() == 0 for agent in self.agents)

    def kill_agent(self, agent: Agent) -> None:
        """Send SIGKILL only to the agent: elastane itself has to end the agent's workers."""
        self.agents.remove(agent)
        agent.process.kill()
        agent.process.wait()

    def dismiss(self, agent: Agent) -> None:
        """Send SIGTERM to the agent, as a preemption does; any exit code is fine after that."""
        self.agents.remove(agent)
        agent.process.terminate()

    def signal_process(self, pid: int, number: signal.Signals) -> None:
        """Send one worker a signal."""
        _send(pid, number)


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until no process runs any more; return those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(REAP_POLL_S)
    return left


def is_running(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_all_children() -> None:
    """SIGKILL every process below this one, until none is left."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            _send(pid, signal.SIGKILL)
        _reap()
        time.sleep(REAP_POLL_S)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return


# The kernel kills workers at the death of their agent; on a busy machine that takes a while.
ORPHANS_GONE_S = 3.0
POLL_S = 0.02


class Show:
    """Follows the job through its event log and the script's progress file, and disturbs it."""

    def __init__(self, cluster: DemoCluster, plan: DemoPlan) -> None:
        self.view = JobView()
        self.points: list[StepProgress] = []
        self.done: list[DemoDone] = []
        self._plan = plan
        self.cluster = cluster
        self._events = EventReader(cluster.log_dir / cluster.job)
        self._progress = ProgressReader(cluster.folder / "progress.jsonl")

    def play(self, show: Callable[[JobView], None], timeout_s: float) -> None:
        """Start two nodes, inject faults by the training's progress, and wait for the job's end."""
        deadline_s = time.monotonic() + timeout_s
        self.cluster.start(self.cluster.next_name())
        while not self.cluster.all_done():
            self._read()
            self._check(deadline_s, timeout_s)
            self._start_second()
            workers = WORKERS_PER_NODE * len(self.cluster.agents)
            if planned := next_act(self._plan, self.points, self.done, workers):
                self._perform(planned)
            self._set_pace()
            show(self.view)
            time.sleep(POLL_S)
        self._read()
        show(self.view)

    def costs(self) -> list[Cost]:
        """Return the cost of each act; raises an error if one has not been performed."""
        costs = [cost for done in self.done if (cost := cost_of(self.points, done))]
        if len(costs) < len(self._plan.acts):
            missing = self._plan.acts[len(costs)].act
            raise WorkerFailedError(
                f"demo: the training ended before it recovered from: {TITLES[missing]}",
                slug="demo-failed",
                where=str(self.cluster.folder),
                expected="a step of a new attempt after each",
            )
        return costs

    def learned(self) -> float:
        """Return the training's final result."""
        if self.view.learned is None:
            raise WorkerFailedError(
                "demo: the training ended without a result",
                slug="demo-failed",
                where=str(self.cluster.folder),
            )
        return self.view.learned

    def wait_done(self, agent: Agent, timeout_s: float) -> None:
        """Wait for the end of the undisturbed job."""
        try:
            code = agent.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            ended = f"not done within {timeout_s:g} s" if code is None else f"ended with {code}"
            raise WorkerFailedError(
                f"demo: the undisturbed run {ended}",
                slug="demo-failed",
                where=f"{agent.log}, which ends with:\n{agent.log_end()}",
            )

    def _read(self) -> None:
        for event in self._events.poll():
            self.view = after_event(self.view, event)
        for point in self._progress.poll():
            self.points.append(point)
            self.view = after_progress(self.view, point)

    def _set_pace(self) -> None:
        """Leave the file that slows the training down, or remove it."""
        path = self.cluster.folder / SLOW_DOWN
        if is_to_slow_down(self._plan, self.points, self.done):
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def _check(self, deadline_s: float, timeout_s: float) -> None:
        if agent := self.cluster.failed():
            raise WorkerFailedError(
                f"demo: the agent of {agent.name} ended with {agent.process.returncode}",
                slug="demo-failed",
                where=f"{agent.log}, which ends with:\n{agent.log_end()}",
                expected="an agent that runs until the job is done",
            )
        if time.monotonic() > deadline_s:
            words = "\n".join(f"{a.name}:\n{a.log_end(5)}" for a in self.cluster.agents)
            raise WorkerFailedError(
                f"demo: not done within {timeout_s:g} s, at step {self.view.step}",
                slug="demo-failed",
                where=f"{self.cluster.folder}; the ends of the agents' logs:\n{words}",
                next_step="elastane demo --timeout 900",
            )

    def _start_second(self) -> None:
        """Start node-b once node-a coordinates, since node-b is killed and must not coordinate."""
        alone = len(self.cluster.agents) == 1 and not self.points
        if alone and any(node.coordinates for node in self.view.nodes.values()):
            self.cluster.start(self.cluster.next_name())

    def _perform(self, planned: PlannedAct) -> None:
        time.sleep(planned.jitter_s)
        agents = self.cluster.agents
        agent = agents[int(planned.pick * len(agents))]
        match planned.act:
            case "kill-worker" | "stop-worker":
                self._harm_worker(planned)
            case "kill-node":
                self._kill_node(agent)
            case "leave":
                self._act("leave", agent.name, "SIGTERM to the agent: the node is to leave")
                self.cluster.dismiss(agent)
            case "add-node":
                name = self.cluster.next_name()
                self._act("add-node", name, "a new node arrives")
                self.cluster.start(name)

    def _harm_worker(self, planned: PlannedAct) -> None:
        alive = [
            (agent, pid)
            for agent in self.cluster.agents
            for pid in self._pids(agent)
            if is_running(pid)
        ]
        agent, pid = alive[int(planned.pick * len(alive))]
        number = signal.SIGKILL if planned.act == "kill-worker" else signal.SIGSTOP
        self._act(planned.act, agent.name, f"{number.name} to the worker with pid {pid}")
        self.cluster.signal_process(pid, number)

    def _kill_node(self, agent: Agent) -> None:
        pids = self._pids(agent)
        what = f"SIGKILL to the whole node's agent (pid {agent.process.pid})"
        self._act("kill-node", agent.name, what)
        self.cluster.kill_agent(agent)
        if left := wait_gone(pids, ORPHANS_GONE_S):
            raise WorkerFailedError(
                f"demo: workers {left} outlived their agent by {ORPHANS_GONE_S:g} s",
                slug="demo-failed",
                where=f"node {agent.name}",
                expected="no worker without an agent",
            )
        self._log(agent.name, f"its {len(pids)} workers ended with it")

    def _pids(self, agent: Agent) -> list[int]:
        node = self.view.node(agent.name)
        if node is None or not node.workers:
            raise WorkerFailedError(
                f"demo: the event log names no workers of {agent.name}",
                slug="demo-failed",
                where=str(self.cluster.log_dir),
            )
        return [worker.pid for worker in node.workers]

    def _act(self, act: Act, node: str, what: str) -> None:
        self._log(node, what)
        self.done.append(DemoDone(act=act, time_s=time.time(), what=f"{node}: {what}"))

    def _log(self, node: str, what: str) -> None:
        self.view = after_act(self.view, time.time(), node, what)


class ProgressReader:
    """Reads the whole lines that a script has appended to its progress file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[StepProgress]:
        """Return the new lines; a missing file is empty."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        decoded = (decode_progress(line) for line in whole.splitlines())
        return [point for point in decoded if point is not None]


def endings(folder: Path) -> list[WorkerEnd]:
    """Return how the workers ended that wrote into a folder; other lines are ignored."""
    try:
        lines = (folder / "final.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [ending for line in lines if (ending := _decode(line)) is not None]


def _decode(line: bytes) -> WorkerEnd | None:
    try:
        return msgspec.json.decode(line, type=WorkerEnd)
    except UNREADABLE:
        return None
