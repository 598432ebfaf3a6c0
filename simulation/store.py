"""The simulated store: a record changed by compare-and-set, a lease, and the coordinator's address.

It can be away for all hosts or cut off from some, be slow, or lose the answer to an operation. Then
the caller cannot tell whether it was done, and it may still be done later. It may lose the lease,
like an etcd that is restored or asked to revoke it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastane.protocol.model import JobRecord
from simulation.clock import VirtualClock

T = TypeVar("T")

# How long a caller waits for an answer.
_PATIENCE_S = 1.0


class SimulatedLease(msgspec.Struct, frozen=True):
    """Which node may decide, in which term, until when by the store's clock."""

    holder: str
    term: int
    until_s: float


class SimulatedRecord(msgspec.Struct, frozen=True):
    """The record, the term that wrote it, and the version that a write must expect."""

    term: int = 0
    record: JobRecord | None = None
    version: int = 0


class Published(msgspec.Struct, frozen=True):
    """Where the coordinator of a term listens; it may be dead by now."""

    term: int
    host: str


class SimulatedStore:
    """Atomic operations, each with a delay there and back."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.filed = SimulatedRecord()
        self.lease: SimulatedLease | None = None
        self.leader: Published | None = None
        self.away = False
        self.slow_s = 0.0
        self.replies_lost = 0  # the next operations whose answers are lost, though they are done
        self.cut_off: set[str] = set()
        self.on_write: Callable[[SimulatedRecord, SimulatedRecord], None] = lambda before, after: (
            None
        )

    def ask(self, host: str, deed: Callable[[], T], answer: Callable[[T | None], None]) -> None:
        """Do `deed` atomically at the store; `answer` gets its result, or None if it is lost."""
        patience = self._clock.after(_PATIENCE_S, lambda: answer(None))

        def there() -> None:
            if not self._reaches(host):
                return
            result = deed()
            if self.replies_lost:
                self.replies_lost -= 1
                return
            self._clock.after(self._delay_s(), lambda: back(result))

        def back(result: T) -> None:
            if self._reaches(host) and patience.cancel():
                answer(result)

        self._clock.after(self._delay_s(), there)

    def take(self, host: str, ttl_s: float) -> int:
        """Take the lease if it is free; return the term, or 0."""
        before = self.lease
        if before is not None and self._clock.now_s < before.until_s:
            return 0
        term = before.term + 1 if before else 1
        self.lease = SimulatedLease(host, term, self._clock.now_s + ttl_s)
        return term

    def renew(self, host: str, term: int, ttl_s: float) -> int:
        """Hold the lease for longer; return its term, a new one where it had ended; 0: lost.

        A lease that ended is renewed if no other node held it meanwhile.
        """
        lease = self.lease
        if lease is None or (lease.holder, lease.term) != (host, term):
            return 0
        now_s = self._clock.now_s
        self.lease = SimulatedLease(host, term + (now_s >= lease.until_s), now_s + ttl_s)
        return self.lease.term

    def release(self, term: int) -> bool:
        """Release the lease."""
        if self.lease is not None and self.lease.term == term:
            self.revoke()
        return True

    def end_lease_of(self, host: str) -> bool:
        """End the lease of the term that `host` published in; return whether it did publish."""
        if self.leader is None or self.leader.host != host:
            return False
        return self.release(self.leader.term)

    def revoke(self) -> None:
        """End the lease now."""
        if self.lease is not None:
            self.lease = SimulatedLease(self.lease.holder, self.lease.term, self._clock.now_s)

    def read(self) -> SimulatedRecord:
        """Return the record as it is now."""
        return self.filed

    def write(self, after: SimulatedRecord) -> tuple[bool, SimulatedRecord]:
        """Replace the record if it is at the version of `after`; return whether, and what it is."""
        before = self.filed
        if after.version != before.version:
            return False, before
        self.filed = SimulatedRecord(after.term, after.record, before.version + 1)
        self.on_write(before, self.filed)
        return True, self.filed

    def published(self) -> tuple[Published | None]:
        """Return where the latest coordinator listens."""
        return (self.leader,)

    def publish(self, leader: Published) -> bool:
        """Publish where a coordinator listens, unless a later term did; return whether."""
        if self.leader is not None and self.leader.term > leader.term:
            return False
        self.leader = leader
        return True

    def _reaches(self, host: str) -> bool:
        return not self.away and host not in self.cut_off

    def _delay_s(self) -> float:
        slow_s = self.slow_s * self._rng.random() if self.slow_s else 0.0
        return 0.0005 + self._rng.random() * 0.004 + slow_s
