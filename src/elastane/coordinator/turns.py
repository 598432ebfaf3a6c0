"""Whose message is next: sessions take turns, one message each, at a bounded rate.

So one chatty session delays nobody else by more than one message. Owns the order only; it knows
neither what messages mean nor what time it is. Nothing here waits or fails.
"""

from __future__ import annotations

import heapq
from collections import deque

from elastane.process.rpc.door import ServerLink
from elastane.protocol.limits import MESSAGES_BURST_MAX, MESSAGES_PER_S_MAX

_MESSAGE_S = 1.0 / MESSAGES_PER_S_MAX
_BURST_S = MESSAGES_BURST_MAX / MESSAGES_PER_S_MAX


class Peer:
    """One session: its number, its link, and how much of its rate it has used."""

    def __init__(self, number: int, link: ServerLink) -> None:
        self.number = number
        self.link = link
        self.used_until_s = 0.0  # by the generic cell rate algorithm, ITU-T I.371
        self.is_queued = False


class Turns:
    """A queue of sessions that have something to say; each is in it once at most."""

    def __init__(self) -> None:
        self._waiting: deque[Peer] = deque()
        self._slowed: list[tuple[float, int, Peer]] = []

    def add(self, peer: Peer) -> None:
        """Give `peer` a turn, after those that have one."""
        if not peer.is_queued:
            peer.is_queued = True
            self._waiting.append(peer)

    def take(self, now_s: float) -> Peer | None:
        """Return the peer whose turn it is, or None while there is nobody."""
        while self._slowed and self._slowed[0][0] <= now_s:
            self._waiting.append(heapq.heappop(self._slowed)[2])
        while self._waiting:
            peer = self._waiting.popleft()
            allowed_s = peer.used_until_s - _BURST_S
            if allowed_s > now_s and not peer.link.is_over:
                heapq.heappush(self._slowed, (allowed_s, peer.number, peer))
                continue
            peer.used_until_s = max(peer.used_until_s, now_s) + _MESSAGE_S
            peer.is_queued = False
            return peer
        return None

    @property
    def next_s(self) -> float | None:
        """When a peer that exceeded its rate has its next turn; None where there is none."""
        return self._slowed[0][0] if self._slowed else None
