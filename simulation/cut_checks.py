"""What must hold of nodes that are left out because another node does not reach them.

A node comes back early only if the network between the two was whole meanwhile. Once it is, and
nothing else disturbs, the first pause ends soon. While it is not, a node stays out beyond its
pause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from elastane.protocol.limits import LEFT_OUT_FIRST_S, PROBE_EVERY_S, PROBE_TIMEOUT_S
from elastane.protocol.log_events import EventKind, LogEvent
from simulation.observed import ObservedCluster

# The network is whole again, and nothing else disturbs: the next probe ends within this time. It
# may begin late, since an agent notices first that its session is dead, and registers again.
READMITTED_S = PROBE_EVERY_S + PROBE_TIMEOUT_S + 20.0
# A probe that finds a cut has certainly been reported after this long without other news.
_REPORTED_S = 60.0
_SILENT = re.compile(r"node (\w+) does not reach node (\w+) at ")
_ANSWERED = re.compile(r"(\w+) to (\w+) at ")
_NEWS = frozenset(
    {
        EventKind.COORDINATOR_STARTED,
        EventKind.NODE_JOINED,
        EventKind.NODE_DEPARTED,
        EventKind.NODE_REGISTERED_AGAIN,
    }
)


@dataclass(frozen=True)
class _LeftOut:
    """A node that is left out: since when, by which coordinator, and which pairs are probed."""

    since_s: float
    coordinator: int
    pairs: tuple[tuple[str, str], ...]
    is_first: bool


class CutCheck:
    """The nodes that are left out, by the events of the coordinators."""

    def __init__(self, cluster: ObservedCluster, require: Callable[[bool, str], None]) -> None:
        self._cluster, self._require = cluster, require
        self._out: dict[str, _LeftOut] = {}
        self._news_s: dict[str, float] = {}
        self.early = self.held = 0

    def noted(self, event: LogEvent) -> None:
        """Check an event of the log."""
        now_s = self._cluster.clock.now_s
        if event.kind in _NEWS:
            self._news_s[event.node_id] = now_s
        elif event.kind is EventKind.NODE_LEFT_OUT:
            pairs = tuple(_SILENT.findall(event.reason)) if event.data["probes"] else ()
            is_first = event.data["pause_s"] == LEFT_OUT_FIRST_S
            coordinator = self._cluster.coordinators_started
            self._out[event.node_id] = _LeftOut(now_s, coordinator, pairs, is_first)
        elif event.kind is EventKind.NODE_READMITTED:
            self._readmitted(event)

    def overdue(self, quiet_s: float) -> str:
        """Return which node is still left out though it is reached, since nothing disturbs."""
        now_s = self._cluster.clock.now_s
        for name, left in self._out.items():
            if now_s - max(quiet_s, left.since_s) > READMITTED_S and self._is_awaited(name, left):
                return f"{name} is left out, and all have reached it for {READMITTED_S:.0f} s"
        return ""

    @property
    def awaits(self) -> bool:
        """Whether a node is left out that is to join again before its pause ends."""
        return any(self._is_awaited(name, left) for name, left in self._out.items())

    def _is_awaited(self, name: str, left: _LeftOut) -> bool:
        cluster = self._cluster
        if not (left.pairs and left.is_first and left.coordinator == cluster.coordinators_started):
            return False
        nodes = [
            cluster.nodes[each] for each in {name, *(end for pair in left.pairs for end in pair)}
        ]
        are_here = all(node.alive and node.is_linked and not node.signalled for node in nodes)
        return are_here and all(cluster.network.linked(*pair) for pair in left.pairs)

    def _readmitted(self, event: LogEvent) -> None:
        left = self._out.pop(event.node_id, None)
        assert left is not None, event
        network, name = self._cluster.network, event.node_id
        apart = [p for p in left.pairs if not network.were_linked_after(*p, left.since_s)]
        if event.reason.startswith("probes"):
            self.early += 1
            told = _ANSWERED.findall(event.reason)
            self._require(
                bool(told) and not apart, f"{name} is readmitted, and {apart} were apart all along"
            )
        elif event.reason.startswith("its pause"):
            known = [pair for pair in apart if self._is_known(pair)]
            self._require(not known, f"{name} is readmitted, and {known} cannot connect")

    def _is_known(self, pair: tuple[str, str]) -> bool:
        """Whether the coordinator must know by now that the two nodes are apart."""
        cluster, now_s = self._cluster, self._cluster.clock.now_s
        nodes = [cluster.nodes[each] for each in pair]
        calm = all(now_s - self._news_s.get(each, 0.0) > _REPORTED_S for each in (*pair, ""))
        return calm and all(node.alive and node.is_linked and not node.paused for node in nodes)
