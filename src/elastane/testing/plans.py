"""Fault plans: which fault hits a job at which time, from one seed.

    plan = FaultPlan.random(seed=7, duration_s=60, every_s=5)
    plan.run(cluster)
    cluster.wait_done()

Pure but for `run`. The same seed gives the same plan. The target of a fault depends on the nodes
present at that time; `run` returns what was done. It fails with UsageError for an invalid plan.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from elastane.errors import UsageError
from elastane.observe.events import LoggedEvent
from elastane.protocol.log_events import EventKind
from elastane.testing.partition import Partition

Kind = Literal[
    "kill-worker", "kill-node", "kill-agent", "stop-node", "pause-node", "add-node", "stop-worker",
    "slow-worker", "partition",
]  # fmt: skip
# A worker that is stopped for good is detected only if the script recovers in place. A slow one is
# no fault that anything has to recover from. A partition takes the right to trace the processes.
KINDS: tuple[Kind, ...] = tuple(
    kind for kind in get_args(Kind) if kind not in ("stop-worker", "slow-worker", "partition")
)
# Kinds after which the node has left.
_REMOVES = ("kill-node", "kill-agent", "stop-node")
_POLL_S = 0.05
_PAUSE_S = 1.0
# A slow worker runs for half of this time, and is stopped for the other half.
_SLOW_S, _SLOW_TURN_S = 2.0, 0.04
# Longer than agents and coordinator are silent to each other before they give each other up.
_PARTITION_S = 10.0


class FaultedNode(Protocol):
    """A node of a job that a plan can harm; `elastane.testing.LocalNode` says what each does."""

    @property
    def name(self) -> str:
        """Its node id."""

    @property
    def is_alive(self) -> bool:
        """Whether its agent runs."""

    @property
    def agent_pid(self) -> int:
        """The process of its agent."""

    def workers(self) -> tuple[int, ...]:
        """Return the pids of its workers."""

    def kill(self) -> None:
        """End all of its processes."""

    def kill_agent(self) -> None:
        """SIGKILL the agent alone."""

    def stop(self) -> None:
        """Ask the agent to leave."""

    def pause(self) -> None:
        """Stop all of its processes."""

    def resume(self) -> None:
        """Let them continue."""


class FaultedJob(Protocol):
    """A job that a plan can harm; `elastane.testing.LocalCluster` says what each does."""

    @property
    def nodes(self) -> Sequence[FaultedNode]:
        """The nodes, those that ended included."""

    def events(self, *kinds: str) -> list[LoggedEvent]:
        """Return the events of these kinds by time."""

    def start(self, name: str) -> FaultedNode:
        """Start a node."""

    def record_fault(self, kind: str, node: str, text: str) -> None:
        """Log an injected fault."""


@dataclass(frozen=True)
class Fault:
    """One fault: seconds after the plan's start, its kind, and its target among those present.

    `pick` is in [0, 1): 0 selects the first node present, 0.99 the last.
    """

    at_s: float
    kind: Kind
    pick: float = 0.0


@dataclass(frozen=True)
class FaultPlan:
    """Faults in the order of time. A node that one removes is started again after `back_s`, if any.

    At least `keep` nodes stay. The nodes in `spare` are never removed or paused: such a fault is
    left out.
    """

    faults: tuple[Fault, ...]
    back_s: float | None = 2.0
    keep: int = 1
    spare: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        times = [fault.at_s for fault in self.faults]
        if times != sorted(times) or any(at_s < 0 for at_s in times):
            raise UsageError(
                f"a plan of faults at {times} s",
                slug="cluster",
                expected="times from 0, in their order",
                next_step="sort the faults by at_s",
            )
        for fault in self.faults:
            if fault.kind not in get_args(Kind) or not 0 <= fault.pick < 1:
                raise UsageError(
                    f"a plan with {fault}",
                    slug="cluster",
                    expected=f"pick in [0, 1), and kind one of {', '.join(get_args(Kind))}",
                    next_step="correct the fault, or let FaultPlan.random() choose the faults",
                )

    @classmethod
    def random(
        cls,
        seed: int,
        duration_s: float,
        every_s: float,
        kinds: Sequence[Kind] = KINDS,
        **rest: Any,
    ) -> FaultPlan:
        """Return a plan from a seed, with a fault each `every_s` seconds, give or take half.

        `rest`: back_s, keep and spare.
        """
        rng, at_s, faults = random.Random(seed), 0.0, []
        while (at_s := at_s + every_s * rng.uniform(0.5, 1.5)) < duration_s:
            faults.append(Fault(at_s, rng.choice(list(kinds)), rng.random()))
        return cls(tuple(faults), **rest)

    def run(self, job: FaultedJob, tell: Callable[[str], None] = lambda text: None) -> list[str]:
        """Inject all faults, and start removed nodes again; return what was done, in words.

        Each fault is logged as the event `fault-injected`, and passed to `tell` as it happens. Ends
        early if the job has ended, or no agent is left.
        """
        begun_s, done_texts = time.monotonic(), list[str]()
        absent: list[tuple[float, str]] = []
        cuts: list[Partition] = []
        faults = list(self.faults)

        def note(text: str) -> None:
            done_texts.append(f"{time.monotonic() - begun_s:.1f} s: {text}")
            tell(done_texts[-1])

        while faults or absent:
            now_s = time.monotonic() - begun_s
            present = _present(job)
            if job.events(EventKind.JOB_ENDED) or not (present or absent):
                break
            for back in [back for back in absent if back[0] <= now_s]:
                if not any(node.name == back[1] for node in present):  # a drain takes its time
                    absent.remove(back)
                    job.start(back[1])
                    note(f"{back[1]} comes back")
            if faults and faults[0].at_s <= now_s:
                fault = faults.pop(0)
                # Those that came back just now are targets, too.
                done, node, gone = self._inject(fault, _present(job), job, cuts)
                if done:
                    job.record_fault(fault.kind, node, done)
                    note(done)
                if gone and self.back_s is not None:
                    absent.append((now_s + self.back_s, node))
            time.sleep(_POLL_S)
        for cut in cuts:
            cut.wait()
        return done_texts

    def _inject(
        self,
        fault: Fault,
        present: list[FaultedNode],
        job: FaultedJob,
        cuts: list[Partition],
    ) -> tuple[str, str, bool]:
        """Return what was done, to which node, and whether that left; all empty for nothing."""
        nothing = "", "", False
        if not present:
            return nothing
        place = fault.pick * len(present)
        node = present[int(place)]
        if fault.kind.endswith("-worker"):
            pids = node.workers()
            if not pids:
                return nothing
            pid = pids[int((place - int(place)) * len(pids))]
            return _harm_worker(fault.kind, pid, node), node.name, False
        if fault.kind == "add-node":
            added = job.start(f"added-{len(job.nodes)}")
            return f"add-node {added.name}", added.name, False
        if node.name in self.spare:
            return nothing
        may_leave = len(present) > self.keep
        done = _harm_node(fault.kind, node, present, cuts, may_leave=may_leave)
        return (done, node.name, fault.kind in _REMOVES) if done else nothing


def _present(job: FaultedJob) -> list[FaultedNode]:
    return [node for node in job.nodes if node.is_alive]


def _harm_node(
    kind: Kind,
    node: FaultedNode,
    present: list[FaultedNode],
    cuts: list[Partition],
    *,
    may_leave: bool,
) -> str:
    """Return what was done to a node; empty if nothing was."""
    if kind == "partition":
        cut = _cut_off(node, present)
        cuts += [cut] if cut is not None else []
        return f"partition of {node.name} for {_PARTITION_S:g} s" if cut is not None else ""
    if kind == "pause-node":
        node.pause()
        time.sleep(_PAUSE_S)  # the fault itself
        node.resume()
        return f"pause-node {node.name} for {_PAUSE_S:g} s"
    if not may_leave:
        return ""
    ends = {"kill-node": node.kill, "kill-agent": node.kill_agent, "stop-node": node.stop}
    ends[kind]()
    return f"{kind} {node.name}"


def _cut_off(node: FaultedNode, present: list[FaultedNode]) -> Partition | None:
    """Cut a node off the others for a time; return the cut, or None if they have no connection."""
    others = [other.agent_pid for other in present if other is not node]
    cut = Partition(node.agent_pid, others).begin()
    if not cut.is_cut:
        cut.end()
        return None
    cut.over_after(_PARTITION_S)
    return cut


def _harm_worker(kind: Kind, pid: int, node: FaultedNode) -> str:
    """Kill, stop or slow a worker, which may have ended with its world by now."""
    text = f"{kind} {pid} of {node.name}"
    if kind == "slow-worker":
        until_s = time.monotonic() + _SLOW_S
        try:
            while time.monotonic() < until_s and pid in node.workers():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_SLOW_TURN_S / 2)  # the fault itself
                os.kill(pid, signal.SIGCONT)
                time.sleep(_SLOW_TURN_S / 2)
        except ProcessLookupError:
            return text
        return f"{text} for {_SLOW_S:g} s"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if kind == "kill-worker" else signal.SIGSTOP)
    return text
