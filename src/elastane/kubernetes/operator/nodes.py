"""The state of nodes, and when that knowledge is too old to act upon.

Pods on a lost node are fenced and deleted by force. So a node counts as lost only after a fresh
read: nodes and pods come by separate watches, and a stalled one would make a new node look gone, or
a healthy one unreachable. Owns those reads. It fails with ApiError of a read, and then nothing is
decided. Where nodes may not be read at all, all of them count as healthy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from elastane.kubernetes.client import Api
from elastane.kubernetes.client.resource import NODES
from elastane.kubernetes.model import SeenNode
from elastane.kubernetes.operator.bounds import NODE_LOOK_S, NODES_ABSENT_MAX
from elastane.kubernetes.operator.cache import Cache
from elastane.kubernetes.operator.kinds import KubernetesNode, node_state


class Nodes:
    """The nodes of the cluster; `changed(name)` is told of each whose state has changed."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._tell = changed
        self.cache: Cache[KubernetesNode] = Cache(self._changed)
        # When each node in doubt was last looked at; whether it was there.
        self._looked: dict[str, tuple[float, bool]] = {}

    def states(self, names: Iterable[str]) -> dict[str, SeenNode]:
        """Return the states of those nodes of which enough is known."""
        if not self.cache.synced:
            return {}
        found = {}
        for name in names:
            node = self.cache.get(f"/{name}")
            if node is not None:
                found[name] = node_state(node)
            elif self._looked.get(name, (0.0, True))[1] is False:
                found[name] = SeenNode(name=name, exists=False)
        return found

    def in_doubt(self, names: Iterable[str]) -> list[str]:
        """Return those that would count as lost, or may, and were not looked at just now."""
        if not self.cache.synced:
            return []
        return [name for name in names if self._is_in_doubt(name)]

    async def look(self, api: Api, names: Iterable[str]) -> None:
        """Ask the API server about nodes."""
        for name in names:
            node = await api.find(NODES, "", name, KubernetesNode)
            if node is not None:
                self.cache.wrote(node)
            elif (before := self.cache.get(f"/{name}")) is not None:
                self.cache.lacks(f"/{name}", before.metadata.uid)
            self._looked.pop(name, None)
            self._looked[name] = (time.monotonic(), node is not None)
            if len(self._looked) > NODES_ABSENT_MAX:
                del self._looked[next(iter(self._looked))]

    def _is_in_doubt(self, name: str) -> bool:
        node = self.cache.get(f"/{name}")
        if node is not None and node_state(node).unreachable_since_s is None:
            return False
        looked_s, was_there = self._looked.get(name, (float("-inf"), True))
        # One that was there at the last look, and is not now, has gone since.
        is_new = node is None and was_there
        return is_new or time.monotonic() - looked_s > NODE_LOOK_S

    def _changed(self, before: KubernetesNode | None, after: KubernetesNode | None) -> None:
        if before is not None and after is not None and node_state(before) == node_state(after):
            return  # a kubelet updates its node every few minutes, mostly without a change
        one = after if after is not None else before
        assert one is not None
        self._tell(one.metadata.name)
