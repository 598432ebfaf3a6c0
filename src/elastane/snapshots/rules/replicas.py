"""The books of copies of snapshots on other nodes: what goes there, what is kept here.

Pure. All nodes copy the same saves: a save is copied only where no node is still copying the one
before, and who saves says which save is `safe`, the last that all nodes have copied. That one stays
where it is, on its own nodes and in its copies, until a later one has come to all: so there is
always one save of which the loss of any one node takes nothing. Who does not know which it is says
"", and it stays the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from elastane.protocol.checkpoints import Fence
from elastane.snapshots.rules.snapshots import Name

# Copies that a node holds for its neighbour: the safe one, and one that comes.
COPIES_MAX = 2


class Outgoing:
    """What this node's peer gets.

    `pinned` are the snapshots that have to stay here for that, `there` are those that the peer has,
    oldest first. `safe` is the nonce of the last save that all nodes have copied.
    """

    def __init__(self) -> None:
        self.safe = ""
        self.copying: Name | None = None
        self.there: tuple[Name, ...] = ()
        self.pinned: frozenset[Name] = frozenset()
        self._peer = ""
        self._is_over = False

    def hear(self, safe: str) -> None:
        """Who saves says which save is safe, or ""."""
        self.safe = safe or self.safe

    def whole(self, name: Name, held: Collection[Name], peer: str) -> bool:
        """A snapshot is whole that is to be copied to `peer`, of those that are `held`.

        Returns whether to begin.
        """
        self._is_over = False
        if self.copying is not None:
            return False  # Who saves did not know; the next one is copied.
        self.pinned = frozenset(n for n in held if n.nonce == self.safe) | {name}
        self.there = tuple(n for n in self.there if n.nonce == self.safe and peer == self._peer)
        self.copying, self._peer = name, peer
        return True

    def over(self) -> None:
        """A snapshot is whole of which no copies are wanted at all."""
        self._is_over = True
        self.unpin()

    def unpin(self) -> None:
        """Memory is short: nothing has to stay but what is being copied."""
        self.pinned = frozenset({self.copying} if self.copying is not None else ())

    def ended(self, name: Name, *, arrived: bool) -> None:
        """The copying has ended."""
        assert name == self.copying, (name, self.copying)
        self.copying = None
        if arrived:
            self.there += (name,)
        if self._is_over:
            self.pinned = frozenset()


class Copy(NamedTuple):
    """A snapshot, and the keeper whose part of it this is."""

    origin: str
    name: Name


class Incoming:
    """What this node holds for others; one copy arrives at a time."""

    def __init__(self) -> None:
        self.held: list[Copy] = []
        self.arriving: Copy | None = None
        self._safe = ""

    def offered(self, copy: Copy, safe: str) -> str:
        """Somebody offers a copy; returns why it is not taken, "" where it is.

        It takes the place of all that is held but of what is `safe`, and of one that was arriving
        from the same keeper: that has begun anew.
        """
        if copy in self.held:
            return "it is here already"
        if copy.name.key.fence < self._fence():
            return "a later round has copied its snapshots here"
        if self.arriving is not None and self._is_in_turn(self.arriving, copy):
            return "another copy is arriving"
        self._safe = safe or self._safe
        kept = sorted((each for each in self.held if each.name.nonce == self._safe), key=_age)
        self.held = kept[len(kept) - min(len(kept), COPIES_MAX - 1) :]
        self.arriving = copy
        return ""

    def arrived(self, copy: Copy) -> bool:
        """It is here, and as it was sent; returns whether it is wanted still."""
        if copy != self.arriving:
            return False
        self.arriving = None
        self.held.append(copy)
        return True

    def failed(self, copy: Copy) -> None:
        """It does not come."""
        if copy == self.arriving:
            self.arriving = None

    def over(self) -> None:
        """Nothing of it is of use any more."""
        self.held, self.arriving = [], None

    def _fence(self) -> Fence:
        known = [*self.held, *([self.arriving] if self.arriving is not None else [])]
        return max((each.name.key.fence for each in known), default=(0, 0, 0))

    @staticmethod
    def _is_in_turn(arriving: Copy, copy: Copy) -> bool:
        is_later = copy.name.key.fence > arriving.name.key.fence
        return arriving.origin != copy.origin and not is_later


def _age(copy: Copy) -> Name:
    return copy.name
