"""The simulated store: one record changed by compare-and-set, one lease with a time to live.

It can be away for everybody or cut off from single hosts, and then an answer may be lost after
the deed was done: whoever asked cannot tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastane.core.model import Record
from elastane.testing.simulation.clock import VirtualClock

T = TypeVar("T")

# What an operation may take before its caller gives up on an answer.
_PATIENCE_S = 1.0


class Lease(msgspec.Struct, frozen=True):
    """Who may decide, in which term, until when by the store's clock."""

    holder: str
    term: int
    until_s: float


class Taken(msgspec.Struct, frozen=True):
    """What an elected coordinator starts from."""

    term: int
    version: int
    record: Record | None
    previous_holder: str


class SimulatedStore:
    """Atomic operations, each with a way there and a way back."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.record: Record | None = None
        self.version = 0
        self.lease: Lease | None = None
        self.away = False
        self.cut_off: set[str] = set()
        self.on_write: Callable[[Record | None, Record], None] = lambda before, after: None

    def holder(self) -> str:
        """Return who holds the lease now, or an empty string."""
        lease = self.lease
        return lease.holder if lease and self._clock.now_s < lease.until_s else ""

    def ask(self, host: str, deed: Callable[[], T], answer: Callable[[T | None], None]) -> None:
        """Do `deed` atomically at the store; `answer` gets its result, or None where it is lost."""

        def there() -> None:
            if not self._reaches(host):
                self._clock.after(_PATIENCE_S, lambda: answer(None))
                return
            result = deed()
            self._clock.after(self._delay_s(), lambda: back(result))

        def back(result: T) -> None:
            if self._reaches(host):
                answer(result)
            else:
                self._clock.after(_PATIENCE_S, lambda: answer(None))

        self._clock.after(self._delay_s(), there)

    def take(self, host: str, ttl_s: float) -> Taken | None:
        """Take the lease where it is free."""
        if self.holder():
            return None
        before = self.lease
        term = before.term + 1 if before else 1
        self.lease = Lease(host, term, self._clock.now_s + ttl_s)
        return Taken(term, self.version, self.record, before.holder if before else "")

    def renew(self, host: str, term: int, ttl_s: float) -> bool:
        """Hold the lease for longer, if nobody took it meanwhile."""
        if self.lease is None or (self.lease.holder, self.lease.term) != (host, term):
            return False
        self.lease = Lease(host, term, self._clock.now_s + ttl_s)
        return True

    def release(self, term: int) -> None:
        """Give the lease up."""
        if self.lease is not None and self.lease.term == term:
            self.lease = Lease(self.lease.holder, term, self._clock.now_s)

    def write(self, version: int, record: Record) -> int:
        """Replace the record of `version`; return the new version, or 0 where it is another."""
        if version != self.version:
            return 0
        before, self.record = self.record, record
        self.version += 1
        self.on_write(before, record)
        return self.version

    def _reaches(self, host: str) -> bool:
        return not self.away and host not in self.cut_off

    def _delay_s(self) -> float:
        return 0.0005 + self._rng.random() * 0.004
