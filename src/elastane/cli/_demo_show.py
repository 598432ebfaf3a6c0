"""Runs the demo: starts real agents on this machine, injects the faults, and measures their cost.

The agents are those of a local cluster (`elastane.testing`), which ends all of their processes
however the demo ends. The show follows the job through its event log and through the progress file
of its script.
"""

from __future__ import annotations

import os
import signal
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from elastane.process.files import process_start
from elastane.protocol.unreadable import UNREADABLE
from elastane.testing import processes
from elastane.testing.cluster import LocalCluster, LocalNode

WORKERS_PER_NODE = 2
# The kernel kills workers at the death of their agent; on a busy machine that takes a while.
ORPHANS_GONE_S = 3.0
POLL_S = 0.02


def cluster_of(folder: Path, script: Sequence[str]) -> LocalCluster:
    """Return the cluster of the demo, which has no node yet."""
    return LocalCluster(
        script,
        folder=folder,
        nnodes="1:2",
        nproc_per_node=WORKERS_PER_NODE,
        min_workers=1,
        max_restarts=5,
        rdzv_id=f"demo-{os.getpid()}",
        local_addr="127.0.0.1",
    )


def run_undisturbed(folder: Path, script: Sequence[str], timeout_s: float) -> None:
    """Run a job of one node, and wait for its success; WorkerFailedError without it."""
    cluster = LocalCluster(script, folder=folder, standalone=True, nproc_per_node=WORKERS_PER_NODE)
    with cluster:
        agent = cluster.start("undisturbed")
        deadline_s = time.monotonic() + timeout_s
        while agent.is_alive and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        code = agent.process.poll()
        if code != 0:
            ended = f"not done within {timeout_s:g} s" if code is None else f"ended with {code}"
            raise WorkerFailedError(
                f"demo: the undisturbed run {ended}",
                slug="demo-failed",
                where=f"{agent.log}, which ends with:\n{log_end(agent)}",
            )


def log_end(agent: LocalNode, lines: int = 30) -> str:
    """Return the last lines of the output of an agent and its workers."""
    return "\n".join(agent.output.splitlines()[-lines:])


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until no process runs any more; return those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if process_start(pid)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


class Show:
    """Follows the job through its event log and the script's progress file, and disturbs it."""

    def __init__(self, cluster: LocalCluster, plan: DemoPlan) -> None:
        self.view = JobView()
        self.points: list[StepProgress] = []
        self.done: list[DemoDone] = []
        self._plan = plan
        self._cluster = cluster
        # The agents that the show has neither killed nor asked to leave.
        self._agents: list[LocalNode] = []
        self._names = (f"node-{letter}" for letter in string.ascii_lowercase)
        self._events = EventReader(cluster.log_dir / cluster.job)
        self._progress = ProgressReader(cluster.folder / "progress.jsonl")

    def play(self, show: Callable[[JobView], None], timeout_s: float) -> None:
        """Start two nodes, inject faults by the training's progress, and wait for the job's end."""
        deadline_s = time.monotonic() + timeout_s
        self._start(next(self._names))
        while not all(agent.process.poll() == 0 for agent in self._agents):
            self._read()
            self._check(deadline_s, timeout_s)
            self._start_second()
            workers = WORKERS_PER_NODE * len(self._agents)
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
                where=str(self._cluster.folder),
                expected="a step of a new attempt after each",
            )
        return costs

    def learned(self) -> float:
        """Return the training's final result."""
        if self.view.learned is None:
            raise WorkerFailedError(
                "demo: the training ended without a result",
                slug="demo-failed",
                where=str(self._cluster.folder),
            )
        return self.view.learned

    def _start(self, name: str) -> None:
        self._agents.append(self._cluster.start(name))

    def _read(self) -> None:
        for event in self._events.poll():
            self.view = after_event(self.view, event)
        for point in self._progress.poll():
            self.points.append(point)
            self.view = after_progress(self.view, point)

    def _set_pace(self) -> None:
        """Leave the file that slows the training down, or remove it."""
        path = self._cluster.folder / SLOW_DOWN
        if is_to_slow_down(self._plan, self.points, self.done):
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def _check(self, deadline_s: float, timeout_s: float) -> None:
        for agent in self._agents:
            if agent.process.poll() not in (None, 0):
                raise WorkerFailedError(
                    f"demo: the agent of {agent.name} ended with {agent.process.returncode}",
                    slug="demo-failed",
                    where=f"{agent.log}, which ends with:\n{log_end(agent)}",
                    expected="an agent that runs until the job is done",
                )
        if time.monotonic() > deadline_s:
            words = "\n".join(f"{a.name}:\n{log_end(a, 5)}" for a in self._agents)
            raise WorkerFailedError(
                f"demo: not done within {timeout_s:g} s, at step {self.view.step}",
                slug="demo-failed",
                where=f"{self._cluster.folder}; the ends of the agents' logs:\n{words}",
                next_step="elastane demo --timeout 900",
            )

    def _start_second(self) -> None:
        """Start node-b once node-a coordinates, since node-b is killed and must not coordinate."""
        alone = len(self._agents) == 1 and not self.points
        if alone and any(node.coordinates for node in self.view.nodes.values()):
            self._start(next(self._names))

    def _perform(self, planned: PlannedAct) -> None:
        time.sleep(planned.jitter_s)
        agent = self._agents[int(planned.pick * len(self._agents))]
        match planned.act:
            case "kill-worker" | "stop-worker":
                self._harm_worker(planned)
            case "kill-node":
                self._kill_node(agent)
            case "leave":
                self._act("leave", agent.name, "SIGTERM to the agent: the node is to leave")
                self._agents.remove(agent)
                agent.stop()
            case "add-node":
                name = next(self._names)
                self._act("add-node", name, "a new node arrives")
                self._start(name)

    def _harm_worker(self, planned: PlannedAct) -> None:
        alive = [
            (agent, pid)
            for agent in self._agents
            for pid in self._pids(agent)
            if process_start(pid)
        ]
        agent, pid = alive[int(planned.pick * len(alive))]
        number = signal.SIGKILL if planned.act == "kill-worker" else signal.SIGSTOP
        self._act(planned.act, agent.name, f"{number.name} to the worker with pid {pid}")
        processes.send(pid, number)

    def _kill_node(self, agent: LocalNode) -> None:
        """SIGKILL only the agent: elastane itself has to end the agent's workers."""
        pids = self._pids(agent)
        what = f"SIGKILL to the whole node's agent (pid {agent.process.pid})"
        self._act("kill-node", agent.name, what)
        self._agents.remove(agent)
        agent.kill_agent()
        if left := wait_gone(pids, ORPHANS_GONE_S):
            raise WorkerFailedError(
                f"demo: workers {left} outlived their agent by {ORPHANS_GONE_S:g} s",
                slug="demo-failed",
                where=f"node {agent.name}",
                expected="no worker without an agent",
            )
        self._log(agent.name, f"its {len(pids)} workers ended with it")

    def _pids(self, agent: LocalNode) -> list[int]:
        node = self.view.node(agent.name)
        if node is None or not node.workers:
            raise WorkerFailedError(
                f"demo: the event log names no workers of {agent.name}",
                slug="demo-failed",
                where=str(self._cluster.log_dir),
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
