"""On which Ray nodes agents are started, and what the end of an agent means for the job.

Pure: nodes, ends and the time in; places and the exit code of the job out. A node has one agent at
most. A node whose agent ended without ending the job is left out for a while, longer each time, so
a broken node does not take the place of a good one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastane.errors import ExitCode

# An agent that was lost, or drained, or ended by a signal can be replaced, on the same node too.
_REPLACED = (int(ExitCode.TRY_AGAIN), int(ExitCode.DRAINED), 137)
RETRY_S = 2.0
RETRY_MAX_S = 60.0
# A node whose agent called it unfit: another one may do better.
UNFIT_S = 300.0
# An agent that lived longer than this had a good node; the next wait is a short one again.
GOOD_S = 120.0


@dataclass(frozen=True)
class RayDrain:
    """Ray drains a node. `left_s`: for how long it stays; None: Ray has set no deadline."""

    left_s: float | None = None


@dataclass(frozen=True)
class RayNode:
    """One node of the cluster, with its resources: all of them, and those that are not in use."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    free: Mapping[str, float]
    drain: RayDrain | None = None


def drains_of(deadlines_ms: Mapping[str, int], now_s: float) -> dict[str, RayDrain]:
    """Return the drains that Ray lists by node: their deadlines in ms of the epoch, 0 for none."""
    return {
        name: RayDrain(max(0.0, at_ms / 1000.0 - now_s) if at_ms else None)
        for name, at_ms in deadlines_ms.items()
    }


def nodes_of(
    listed: Iterable[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    drains: Mapping[str, RayDrain],
) -> list[RayNode]:
    """Return the living nodes among those that `ray.nodes()` lists.

    `free` resources and `drains` by node.
    """
    return [
        RayNode(
            node_id=str(one["NodeID"]),
            address=str(one["NodeManagerAddress"]),
            resources=dict(one["Resources"]),
            free=dict(free.get(str(one["NodeID"]), {})),
            drain=drains.get(str(one["NodeID"])),
        )
        for one in listed
        if one["Alive"]
    ]


@dataclass
class _Trials:
    """The agents of one node so far."""

    begun_s: float = 0.0
    failures: int = 0
    not_before_s: float = 0.0


@dataclass
class Placement:
    """The places of a job's agents. `most`: nodes of the job; `need`: resources of each node.

    `code` is the exit code of the job, once an agent has ended with the job.
    """

    most: int
    need: Mapping[str, float]
    code: int | None = None
    _running: set[str] = field(default_factory=set)
    _trials: dict[str, _Trials] = field(default_factory=dict)

    def due(self, nodes: Iterable[RayNode], now_s: float) -> list[RayNode]:
        """Return the nodes on which an agent starts now; each counts as running from here on.

        None of them is one that Ray drains.
        `nodes`: all that live. An actor on a node without room would wait, and keep another node
        from its place.
        """
        found: list[RayNode] = []
        if self.code is not None:
            return found
        nodes = [*nodes]
        kept = {node.node_id for node in nodes} | self._running
        self._trials = {name: one for name, one in self._trials.items() if name in kept}
        for node in nodes:
            if len(self._running) >= self.most:
                break
            trials = self._trials.setdefault(node.node_id, _Trials())
            if node.node_id in self._running or now_s < trials.not_before_s:
                continue
            if node.drain is None and self._covers(node.free):
                self._running.add(node.node_id)
                trials.begun_s = now_s
                found.append(node)
        return found

    def is_large_enough(self, node: RayNode) -> bool:
        """Whether the node could hold an agent if it held nothing else."""
        return self._covers(node.resources)

    def ended(self, node_id: str, code: int | None, now_s: float) -> None:
        """Record the end of a node's agent; `code`: its exit code, None if it was lost."""
        self._running.discard(node_id)
        if is_final(code):
            # A failure says more than the success of a node that had left before.
            self.code = code if self.code is None else self.code or code
            return
        trials = self._trials.setdefault(node_id, _Trials())
        trials.failures = 1 if now_s - trials.begun_s > GOOD_S else trials.failures + 1
        wait_s = min(RETRY_S * 2.0 ** (trials.failures - 1), RETRY_MAX_S)
        trials.not_before_s = now_s + (UNFIT_S if code == ExitCode.NODE_UNFIT else wait_s)

    def _covers(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0.0) >= count for name, count in self.need.items())


def is_final(code: int | None) -> bool:
    """Whether an agent that ends so has ended with its job; None: it was lost."""
    if code is None or code < 0 or code == ExitCode.NODE_UNFIT:
        return False
    return code not in _REPLACED
