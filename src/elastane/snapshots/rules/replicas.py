"""Rules of replicas: which snapshots this node sends to its peer, and which it holds for others.

Pure. All nodes replicate the same saves, since a save is replicated only if no node is still
sending the one before. The savers name the `safe` save: the last one that all nodes have
replicated. It stays on its own nodes and in its replicas until a later save is safe. Hence one save
always survives the loss of any single node. A saver that does not know the safe save passes "",
which leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from elastane.protocol.checkpoints import Fence
from elastane.snapshots.rules.slot_table import Name

# Replicas that a node holds for its peer: the safe one, and an arriving one.
COPIES_MAX = 2


class OutgoingReplicas:
    """The replicas that this node sends to its peer.

    `pinned` are the snapshots that must stay here for that. `there` are those that the peer holds,
    oldest first. `safe` is the nonce of the last save that all nodes have replicated.
    """

    def __init__(self) -> None:
        self.safe = ""
        self.copying: Name | None = None
        self.there: tuple[Name, ...] = ()
        self.pinned: frozenset[Name] = frozenset()
        self._peer = ""
        self._stopped = False

    def set_safe(self, safe: str) -> None:
        """Record the nonce of the last save that all nodes have replicated; "" changes nothing."""
        self.safe = safe or self.safe

    def begin(self, name: Name, held: Collection[Name], peer: str) -> bool:
        """Begin to send a whole snapshot to `peer`; returns false if one is being sent.

        `held` are the snapshots of this node.
        """
        self._stopped = False
        if self.copying is not None:
            return False  # The savers did not know; the next save is replicated.
        self.pinned = frozenset(n for n in held if n.nonce == self.safe) | {name}
        self.there = tuple(n for n in self.there if n.nonce == self.safe and peer == self._peer)
        self.copying = name
        self._peer = peer
        return True

    def stop(self) -> None:
        """Keep no snapshot for replication: the workers ask for no replicas any more."""
        self._stopped = True
        self.unpin()

    def unpin(self) -> None:
        """Keep only the snapshot that is being sent, because memory is short."""
        self.pinned = frozenset({self.copying} if self.copying is not None else ())

    def ended(self, name: Name, *, arrived: bool) -> None:
        """Record the end of a transfer."""
        assert name == self.copying, (name, self.copying)
        self.copying = None
        if arrived:
            self.there += (name,)
        if self._stopped:
            self.pinned = frozenset()


class ReplicaName(NamedTuple):
    """A snapshot, and the snapshot server whose part of it this is."""

    origin: str
    name: Name


class IncomingReplicas:
    """The replicas that this node holds for others; one arrives at a time."""

    def __init__(self) -> None:
        self.held: list[ReplicaName] = []
        self.arriving: ReplicaName | None = None
        self._safe = ""

    def offered(self, copy: ReplicaName, safe: str) -> str:
        """Accept or decline an offered replica; returns the reason to decline, "" to accept.

        An accepted replica replaces all held ones but the safe one. It also replaces one that was
        arriving from the same server, which has started again.
        """
        if copy in self.held:
            return "it is here already"
        if copy.name.key.fence < self._fence():
            return "a later round has replicated its snapshots here"
        if self.arriving is not None and self._must_wait(self.arriving, copy):
            return "another replica is arriving"
        self._safe = safe or self._safe
        kept = sorted((each for each in self.held if each.name.nonce == self._safe), key=_age)
        self.held = kept[len(kept) - min(len(kept), COPIES_MAX - 1) :]
        self.arriving = copy
        return ""

    def arrived(self, copy: ReplicaName) -> bool:
        """Record a verified replica; returns false if it is no longer wanted."""
        if copy != self.arriving:
            return False
        self.arriving = None
        self.held.append(copy)
        return True

    def failed(self, copy: ReplicaName) -> None:
        """Record that a replica did not arrive."""
        if copy == self.arriving:
            self.arriving = None

    def clear(self) -> None:
        """Remove everything."""
        self.held = []
        self.arriving = None

    def _fence(self) -> Fence:
        known = [*self.held, *([self.arriving] if self.arriving is not None else [])]
        return max((each.name.key.fence for each in known), default=(0, 0, 0))

    @staticmethod
    def _must_wait(arriving: ReplicaName, copy: ReplicaName) -> bool:
        is_later = copy.name.key.fence > arriving.name.key.fence
        return arriving.origin != copy.origin and not is_later


def _age(copy: ReplicaName) -> Name:
    return copy.name
