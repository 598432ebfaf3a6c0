"""Which of several operators acts: the holder of a Lease, as with the coordinators of jobs.

It fails with LeaseLostError from `keep` once the lease is lost. A failure to read or write it is
logged once and retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from elastane.errors import ElastaneError, LeaseLostError
from elastane.kubernetes.operator.bounds import (
    LEASE_HOLD_S,
    LEASE_LOOK_S,
    LEASE_RENEW_S,
    LEASE_REQUEST_S,
    LEASE_S,
)
from elastane.kubernetes.store.lease import KubernetesLease, LeasePlace
from elastane.stores import boot_clock

_log = logging.getLogger(__name__)
_SILENT = "the API server does not answer"


class Elector:
    """Takes and keeps the lease of `place`, as `identity`."""

    def __init__(self, place: LeasePlace, identity: str, lease_s: float = LEASE_S) -> None:
        self._told = f"{place.namespace}/{place.metadata()['name']}"
        self._identity = identity
        self._pace = lease_s / LEASE_S
        margin = 1 - LEASE_HOLD_S / LEASE_S
        self._lease = KubernetesLease(place, self._told, identity.encode(), lease_s, margin)
        # When the lease was last read or written; what stands against it, for a person.
        self.looked_s = float("-inf")
        self.trouble = ""

    def held(self) -> bool:
        """Return whether this operator may act at this moment."""
        return self._lease.held()

    async def campaign(self) -> None:
        """Return once the lease is held. Cancel it to withdraw."""
        while not self.held():
            await self._try(self._lease.take(), LEASE_REQUEST_S)
            if not self.held():
                await asyncio.sleep(LEASE_LOOK_S * self._pace)
        _log.info("lease %s is held by %s", self._told, self._identity)

    async def keep(self) -> None:
        """Renew until the lease is lost; then raise LeaseLostError, at that moment."""
        while self.held():
            left_s = self._lease.remaining_s()
            await asyncio.sleep(min(LEASE_RENEW_S * self._pace, left_s))
            left_s = max(0.0, self._lease.remaining_s())
            await self._try(self._lease.renew(), min(left_s, LEASE_REQUEST_S))
        raise LeaseLostError(
            f"the lease {self._told} is not held any more",
            slug="operator-lease-lost",
            where=f"operator {self._identity}",
            expected="an API server that grants renewals, and no other operator that takes over",
            next_step="nothing: another operator acts, and the Deployment starts this one anew",
        )

    async def resign(self) -> None:
        """Give the lease back, so that another may act at once."""
        if self.held():
            await self._try(self._lease.release(), LEASE_REQUEST_S)

    async def _try(self, deed: Awaitable[object], patience_s: float) -> None:
        """Look at the lease, or write it; what stands against that is told once."""
        try:
            async with asyncio.timeout(patience_s):
                await deed
        except (ElastaneError, TimeoutError) as error:
            what = error.what if isinstance(error, ElastaneError) else _SILENT
            if what != self.trouble:
                _log.warning("lease %s: %s", self._told, what)
            self.trouble = what
            return
        self.trouble, self.looked_s = "", boot_clock()
