"""The running demo: what is read from the job, what is done to it, and what each act cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from elastane.cli._demo_cluster import Agent, Cluster, wait_gone
from elastane.cli._demo_story import TITLES, Act, Cost, Done, cost_of, next_act
from elastane.dashboard.view import (
    Progress,
    View,
    after_act,
    after_event,
    after_progress,
    decode_progress,
)
from elastane.errors import WorkerFailedError
from elastane.observe.events import EventReader

# Workers get SIGKILL from the kernel at the death of their agent: this only covers a busy machine.
ORPHANS_GONE_S = 3.0
POLL_S = 0.02


class Show:
    """Follows the job through its event log and the script's progress file, and harms it."""

    def __init__(self, cluster: Cluster) -> None:
        self.view = View()
        self.points: list[Progress] = []
        self.done: list[Done] = []
        self._cluster = cluster
        self._events = EventReader(cluster.log_dir / cluster.job)
        self._progress = ProgressReader(cluster.folder / "progress.jsonl")

    def play(self, show: Callable[[View], None], timeout_s: float) -> None:
        """Start two nodes, act by the training's progress, and return when the job has ended."""
        deadline_s = time.monotonic() + timeout_s
        self._cluster.start("node-a")
        while not self._cluster.all_done():
            self._read()
            self._check(deadline_s, timeout_s)
            self._start_second()
            if act := next_act(self.points, self.done):
                self._carry_out(act)
            show(self.view)
            time.sleep(POLL_S)
        self._read()
        show(self.view)

    def costs(self) -> list[Cost]:
        """Return what each act cost; every one that was due must have come."""
        costs = [cost for done in self.done if (cost := cost_of(self.points, done))]
        missing = [title for act, title in TITLES.items() if act not in {c.act for c in costs}]
        if missing:
            raise WorkerFailedError(
                f"demo: the training ended before it came back from: {', '.join(missing)}",
                slug="demo-failed",
                where=str(self._cluster.folder),
                expected="a step of a new attempt after each",
            )
        return costs

    def _read(self) -> None:
        for event in self._events.poll():
            self.view = after_event(self.view, event)
        for point in self._progress.poll():
            self.points.append(point)
            self.view = after_progress(self.view, point)

    def _check(self, deadline_s: float, timeout_s: float) -> None:
        if agent := self._cluster.failed():
            raise WorkerFailedError(
                f"demo: the agent of {agent.name} ended with {agent.process.returncode}",
                slug="demo-failed",
                where=f"{agent.log}, which ends with:\n{agent.last_words()}",
                expected="it to train until the job is done",
            )
        if time.monotonic() > deadline_s:
            words = "\n".join(f"{a.name}:\n{a.last_words(5)}" for a in self._cluster.agents)
            raise WorkerFailedError(
                f"demo: not done within {timeout_s:g} s, at step {self.view.step}",
                slug="demo-failed",
                where=f"{self._cluster.folder}; the agents' last words:\n{words}",
                next_step="elastane demo --timeout 900",
            )

    def _start_second(self) -> None:
        """Start node-b once node-a coordinates: the node that is killed is to be the other one."""
        alone = len(self._cluster.agents) == 1 and not self.points
        if alone and any(node.coordinates for node in self.view.nodes):
            self._cluster.start("node-b")

    def _carry_out(self, act: Act) -> None:
        match act:
            case "kill-worker":
                self._kill_worker(self._cluster.agents[1])
            case "kill-node":
                self._kill_node(self._cluster.agents[1])
            case "add-node":
                self._act(act, "node-c", "a new node arrives")
                self._cluster.start("node-c")

    def _kill_worker(self, agent: Agent) -> None:
        pid = self._pids(agent)[-1]
        rank = self.view.world_size - 1
        self._act("kill-worker", agent.name, f"SIGKILL to the worker of rank {rank} (pid {pid})")
        self._cluster.kill_process(pid)

    def _kill_node(self, agent: Agent) -> None:
        pids = self._pids(agent)
        what = f"SIGKILL to the whole node's agent (pid {agent.process.pid})"
        self._act("kill-node", agent.name, what)
        self._cluster.kill_agent(agent)
        if left := wait_gone(pids, ORPHANS_GONE_S):
            raise WorkerFailedError(
                f"demo: workers {left} outlived their agent by {ORPHANS_GONE_S:g} s",
                slug="demo-failed",
                where=f"node {agent.name}",
                expected="no worker without an agent",
            )
        self._say(agent.name, f"its {len(pids)} workers are gone with it")

    def _pids(self, agent: Agent) -> list[int]:
        node = self.view.node(agent.name)
        if node is None or not node.workers:
            raise WorkerFailedError(
                f"demo: the event log names no workers of {agent.name}",
                slug="demo-failed",
                where=str(self._cluster.log_dir),
            )
        return [worker.pid for worker in node.workers]

    def _act(self, act: Act, node: str, what: str) -> None:
        self._say(node, what)
        self.done.append(Done(act=act, time_s=time.time(), what=f"{node}: {what}"))

    def _say(self, node: str, what: str) -> None:
        self.view = after_act(self.view, time.time(), node, what)


class ProgressReader:
    """Reads the whole lines that a script has appended to its progress file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Progress]:
        """Return what is new; a file that is not there yet is empty."""
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
