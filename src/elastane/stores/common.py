"""What the stores share: a holder's own count of its lease, and a watch that looks now and then.

Knows nothing of how a store keeps things. How it fails: it does not; a store's own errors pass.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from elastane.errors import LeaseLostError
from elastane.protocol.limits import LEASE_MARGIN
from elastane.stores.protocol import Entry


def boot_clock() -> float:
    """Return seconds since boot, those of suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldLease:
    """The holder's side of a lease: its term, and until when it may decide, by its own clock.

    A store's lease derives from it, and calls `count_from` with the moment at which it began to
    take or renew the lease, once it knows that this was done.
    """

    def __init__(
        self,
        key: str,
        ttl_s: float,
        clock: Callable[[], float],
        margin: float = LEASE_MARGIN,
    ) -> None:
        self._key = key
        self._ttl_s = ttl_s
        self._clock = clock
        self._margin = margin
        self._term = 0
        self._until_s = -math.inf
        self._lost = False

    @property
    def term(self) -> int:
        """See Lease.term."""
        assert self._term, "a lease that was never taken was handed out"
        return self._term

    def remaining_s(self) -> float:
        """See Lease.remaining_s."""
        return -math.inf if self._lost else self._until_s - self._clock()

    def held(self) -> bool:
        """See Lease.held."""
        return self.remaining_s() > 0

    def count_from(self, begun_s: float) -> None:
        """Count the ttl from `begun_s`, less the margin; a slower answer takes nothing back."""
        self._until_s = max(self._until_s, begun_s + self._ttl_s * (1 - self._margin))

    def deposed(self, by: str, where: str = "") -> LeaseLostError:
        """Count the lease as lost for good, and return the error that says by whom."""
        self._lost = True
        return LeaseLostError(
            f"lease {self._key}: term {self._term} was followed by {by}",
            slug="lease-lost",
            where=where,
        )


async def watch_by_looking(
    get: Callable[[], Awaitable[Entry | None]], after_version: int, pause_s: float
) -> AsyncGenerator[Entry | None, None]:
    """Yield what Store.watch promises, for a store that tells nobody of a change."""
    known = after_version
    while True:
        entry = await get()
        if entry is not None and entry.version > known:
            known = entry.version
            yield entry
        elif entry is None and known:
            known = 0
            yield None
        else:
            await asyncio.sleep(pause_s)
