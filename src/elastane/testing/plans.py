"""Fault plans: which fault hits a local cluster at which time, from one seed.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from elastane.errors import UsageError
from elastane.protocol.log_events import EventKind
from elastane.testing.cluster import LocalCluster, LocalNode

Kind = Literal[
    "kill-worker", "kill-node", "kill-agent", "stop-node", "pause-node", "add-node", "stop-worker"
]
# A worker that is stopped for good is detected only if the script recovers in place.
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "stop-worker")
_POLL_S = 0.05
_PAUSE_S = 1.0


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
    """Faults in the order of time. A node that one removes is started again after `back_s`.

    At least `keep` nodes stay. The nodes in `spare` are never removed or paused: such a fault is
    left out.
    """

    faults: tuple[Fault, ...]
    back_s: float = 2.0
    keep: int = 1
    spare: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        times = [fault.at_s for fault in self.faults]
        if times != sorted(times) or any(at_s < 0 for at_s in times):
            raise UsageError(
                f"a plan of faults at {times} s", slug="cluster", expected="times in their order"
            )
        for fault in self.faults:
            if fault.kind not in get_args(Kind) or not 0 <= fault.pick < 1:
                raise UsageError(
                    f"a plan with {fault}",
                    slug="cluster",
                    expected=f"pick in [0, 1), and kind one of {', '.join(get_args(Kind))}",
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

    def run(self, cluster: LocalCluster) -> list[str]:
        """Inject all faults, and start removed nodes again; return what was done, in words.

        Ends early if the job has ended, or no agent is left.
        """
        begun_s, done_texts = time.monotonic(), list[str]()
        absent: list[tuple[float, str]] = []
        faults = list(self.faults)
        while faults or absent:
            now_s = time.monotonic() - begun_s
            present = _present(cluster)
            if cluster.events(EventKind.JOB_ENDED) or not (present or absent):
                break
            for back in [back for back in absent if back[0] <= now_s]:
                if not cluster.node(back[1]).is_alive:  # a draining node takes its time
                    absent.remove(back)
                    cluster.start(back[1])
                    done_texts.append(f"{now_s:.1f} s: {back[1]} comes back")
            if faults and faults[0].at_s <= now_s:
                done, gone = self._inject(faults.pop(0), present, cluster)
                done_texts += [f"{now_s:.1f} s: {done}"] if done else []
                absent += [(now_s + self.back_s, gone)] if gone else []
            time.sleep(_POLL_S)
        return done_texts

    def _inject(
        self, fault: Fault, present: list[LocalNode], cluster: LocalCluster
    ) -> tuple[str, str]:
        """Return what was done, and the name of a node to start again; both empty for nothing."""
        if not present:
            return "", ""
        node = present[int(fault.pick * len(present))]
        if fault.kind in ("kill-worker", "stop-worker"):
            pids = node.workers()
            if not pids:
                return "", ""
            number = signal.SIGKILL if fault.kind == "kill-worker" else signal.SIGSTOP
            pid = pids[int(fault.pick * len(pids))]  # the world may have changed by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            return f"{fault.kind} {pid} of {node.name}", ""
        if fault.kind == "add-node":
            added = cluster.start(f"added-{len(cluster.nodes)}")
            return f"add-node {added.name}", ""
        if node.name in self.spare:
            return "", ""
        if fault.kind == "pause-node":
            node.pause()
            time.sleep(_PAUSE_S)  # the fault itself
            node.resume()
            return f"pause-node {node.name} for {_PAUSE_S:g} s", ""
        if len(present) <= self.keep:
            return "", ""
        ends = {"kill-node": node.kill, "kill-agent": node.kill_agent, "stop-node": node.stop}
        ends[fault.kind]()
        return f"{fault.kind} {node.name}", node.name


def _present(cluster: LocalCluster) -> list[LocalNode]:
    return [node for node in cluster.nodes if node.is_alive]
