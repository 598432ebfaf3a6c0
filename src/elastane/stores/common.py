"""What stores share: the holder's own count of its lease, and a watch that polls.

Knows nothing of how a store keeps its keys. It raises no errors of its own; those of the store pass
through.
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
    """Return seconds since boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldLease:
    """The holder's side of a lease: its term, and until when it may decide, by its own clock.

    The lease of a store derives from it. After each taking or renewal that succeeded it calls
    `count_from` with the moment at which it had sent the request.
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
        """Count the ttl from `begun_s`, less the margin; an older start changes nothing."""
        self._until_s = max(self._until_s, begun_s + self._ttl_s * (1 - self._margin))

    def deposed(self, by: str, where: str = "") -> LeaseLostError:
        """Count the lease as lost for good, and return the error that names the new holder."""
        self._lost = True
        return LeaseLostError(
            f"lease {self._key}: term {self._term} was followed by {by}",
            slug="lease-lost",
            where=where,
        )


async def watch_by_polling(
    get: Callable[[], Awaitable[Entry | None]], after_version: int, pause_s: float
) -> AsyncGenerator[Entry | None, None]:
    """Yield what Store.watch promises, by polling, for a store that announces no changes."""
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
