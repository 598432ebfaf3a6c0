"""The running demo: reads the job's progress, performs the acts, and computes their costs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from elastane.cli._demo_cluster import (
    WORKERS_PER_NODE,
    Agent,
    DemoCluster,
    is_running,
    wait_gone,
)
from elastane.cli._demo_progress import ProgressReader
from elastane.cli._demo_story import (
    TITLES,
    Act,
    Cost,
    DemoDone,
    DemoPlan,
    PlannedAct,
    cost_of,
    next_act,
)
from elastane.errors import WorkerFailedError
from elastane.observe.dashboard import (
    JobView,
    StepProgress,
    after_act,
    after_event,
    after_progress,
)
from elastane.observe.events import EventReader

# The kernel sends workers SIGKILL at the death of their agent; this covers a busy machine.
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
        """Start two nodes, act by the training's progress, and return when the job has ended."""
        deadline_s = time.monotonic() + timeout_s
        self.cluster.start(self.cluster.next_name())
        while not self.cluster.all_done():
            self._read()
            self._check(deadline_s, timeout_s)
            self._start_second()
            workers = WORKERS_PER_NODE * len(self.cluster.agents)
            if planned := next_act(self._plan, self.points, self.done, workers):
                self._perform(planned)
            show(self.view)
            time.sleep(POLL_S)
        self._read()
        show(self.view)

    def costs(self) -> list[Cost]:
        """Return the cost of each act; a missing act is an error."""
        costs = [cost for done in self.done if (cost := cost_of(self.points, done))]
        if len(costs) < len(self._plan.acts):
            missing = self._plan.acts[len(costs)].act
            raise WorkerFailedError(
                f"demo: the training ended before it came back from: {TITLES[missing]}",
                slug="demo-failed",
                where=str(self.cluster.folder),
                expected="a step of a new attempt after each",
            )
        return costs

    def learned(self) -> float:
        """Return the training's final result."""
        if self.view.learned is None:
            raise WorkerFailedError(
                "demo: the training ended and did not say what it has learned",
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

    def _check(self, deadline_s: float, timeout_s: float) -> None:
        if agent := self.cluster.failed():
            raise WorkerFailedError(
                f"demo: the agent of {agent.name} ended with {agent.process.returncode}",
                slug="demo-failed",
                where=f"{agent.log}, which ends with:\n{agent.log_end()}",
                expected="it to train until the job is done",
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
        """Start node-b once node-a coordinates: the node to kill must not coordinate."""
        alone = len(self.cluster.agents) == 1 and not self.points
        if alone and any(node.coordinates for node in self.view.nodes):
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
        self._log(agent.name, f"its {len(pids)} workers are gone with it")

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
