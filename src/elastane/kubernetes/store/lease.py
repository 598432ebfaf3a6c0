"""A lease as a coordination.k8s.io Lease: of a job's store, and of the operators.

Every write replaces only the version that was read last, so one of several candidates wins. The
term is the version that the new holder replaced. Terms grow even if the Lease was deleted in
between. Each candidate judges expiry by its own clock, from when it saw the last renewal.
leaseTransitions and the times in the Lease are only for people.

It fails as `LeasePlace.ask` says, and with LeaseLostError if another process holds the lease.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from elastane.errors import LeaseLostError, StoreError
from elastane.kubernetes.client import Api, ApiConflictError, ApiError, ApiNotFoundError
from elastane.kubernetes.client.resource import LEASES
from elastane.kubernetes.store.objects import (
    POD_ANNOTATION,
    TERM_ANNOTATION,
    VALUE_ANNOTATION,
    LeaseObject,
    micro_time,
)
from elastane.protocol.limits import LEASE_MARGIN
from elastane.stores import HeldLease, boot_clock

T = TypeVar("T")
# Attempts of a renewal that finds its own earlier write, whose answer was lost.
_TURNS_MAX = 3


class ApiCall(Protocol):
    """Returns the API's answer to a request (`get leases`), and translates the API's errors."""

    def __call__(self, request: str, asking: Awaitable[T]) -> Awaitable[T]:
        """Return the answer."""


async def plainly(request: str, asking: Awaitable[T]) -> T:
    """Return the answer, and raise the API's errors as they are."""
    return await asking


class _LeaseSighting(NamedTuple):
    """A version of a lease, and when it was first seen, by this process's clock."""

    version: str
    seen_s: float


@dataclass
class LeasePlace:
    """One Lease object: where it is, how it is written, and since when it is unchanged.

    `metadata` is what the Lease is created with, its name included. `patches`: write by PATCH and
    not by PUT, which need different rights. `pod`: the uid of the ElasticJob's pod in which this
    process runs, if any.
    """

    api: Api
    namespace: str
    metadata: Callable[[], dict[str, Any]]
    ask: ApiCall = plainly
    clock: Callable[[], float] = boot_clock
    patches: bool = False
    pod: str = ""
    _sighting: _LeaseSighting | None = field(default=None, init=False)

    async def find(self) -> LeaseObject | None:
        """Return the object, or None if it does not exist."""
        name = self.metadata()["name"]
        asking = self.api.find(LEASES, self.namespace, name, LeaseObject)
        return await self.ask("get leases", asking)

    async def write(
        self, version: int, spec: dict[str, Any], annotations: dict[str, str]
    ) -> LeaseObject:
        """Write the object if it is at `version` (0: absent); ApiConflictError if it is not."""
        metadata = self.metadata()
        metadata["annotations"] = metadata.get("annotations", {}) | annotations
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": spec,
        }
        if not version:
            asking = self.api.create(LEASES, self.namespace, body, LeaseObject)
            return await self.ask("create leases", asking)
        metadata["resourceVersion"] = str(version)
        if self.patches:
            name = metadata["name"]
            asking = self.api.patch(LEASES, self.namespace, name, body, LeaseObject)
            return await self.ask("patch leases", asking)
        asking = self.api.replace(LEASES, self.namespace, body, LeaseObject)
        return await self.ask("update leases", asking)

    def is_free(self, found: LeaseObject | None) -> bool:
        """Whether the lease is released, or was not renewed within its ttl by this clock."""
        if found is None or not found.holder:
            return True
        now_s, version = self.clock(), found.metadata.resourceVersion
        if self._sighting is None or self._sighting.version != version:
            self._sighting = _LeaseSighting(version, now_s)
            return False
        return now_s - self._sighting.seen_s >= found.ttl_s


async def free_of(place: LeasePlace, pods: Collection[str]) -> str:
    """Release a lease for its holder, if the holder was in one of these dead pods.

    Returns the uid of that pod; "" if the lease has another holder or none.
    """
    ended = await end_holding(place, lambda found: found.pod in pods)
    return ended.pod if ended is not None else ""


async def end_holding(
    place: LeasePlace, is_meant: Callable[[LeaseObject], bool]
) -> LeaseObject | None:
    """Release a held lease for its holder if `is_meant`; return the lease as it was before.

    Only the version that `is_meant` has judged is replaced.
    """
    for _ in range(_TURNS_MAX):
        found = await place.find()
        if found is None or not found.holder or not is_meant(found):
            return None
        with contextlib.suppress(ApiConflictError):
            spec = {"holderIdentity": None, "leaseTransitions": found.spec.leaseTransitions}
            await place.write(found.metadata.version, spec, {})
            return found
    return None


class _TakenLease(NamedTuple):
    """A lease that was taken: what was written, the term, and when the request was sent."""

    version: int
    transitions: int
    acquired: str
    term: int
    begun_s: float


class LeaseCandidacy:
    """One candidate for the lease at a place; `take` tries once."""

    def __init__(
        self, place: LeasePlace, key: str, value: bytes, ttl_s: float, margin: float = LEASE_MARGIN
    ) -> None:
        self.place = place
        self.key = key
        self.ttl_s = ttl_s
        self.margin = margin
        # Each candidacy has a new identity: a write of an earlier one must not count as its own.
        self.identity = f"{value.decode(errors='replace')[:100]}_{secrets.token_hex(8)}"
        self._value = value

    async def take(self) -> KubernetesLease | None:
        """Return the lease if it is free; None if it is held, or another candidate was quicker."""
        found = await self.place.find()
        # This candidate already holds the lease if only the answer to its write was lost.
        is_own = found is not None and found.holder == self.identity
        if not is_own and not self.place.is_free(found):
            return None
        begun_s = self.place.clock()
        try:
            if found is None:
                found = await self.place.write(0, {}, {})
            term = found.metadata.version
            transitions, acquired = (found.spec.leaseTransitions or 0) + 1, micro_time()
            written = await self.place.write(term, *self.holding(term, transitions, acquired))
        except (ApiConflictError, ApiNotFoundError):
            return None
        taken = _TakenLease(written.metadata.version, transitions, acquired, term, begun_s)
        return KubernetesLease(self, taken)

    def holding(
        self, term: int, transitions: int, acquired: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the spec and the annotations of a Lease that this candidate holds from now."""
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self.ttl_s),
            "acquireTime": acquired,
            "renewTime": micro_time(),
            "leaseTransitions": transitions,
        }
        annotations = {VALUE_ANNOTATION: self._value.hex(), TERM_ANNOTATION: str(term)}
        if self.place.pod:
            annotations[POD_ANNOTATION] = self.place.pod
        return spec, annotations


class KubernetesLease(HeldLease):
    """The lease that a candidacy took; `LeaseCandidacy.take` makes it."""

    def __init__(self, candidacy: LeaseCandidacy, taken: _TakenLease) -> None:
        super().__init__(
            candidacy.key,
            candidacy.ttl_s,
            candidacy.place.clock,
            candidacy.margin,
            term=taken.term,
            begun_s=taken.begun_s,
        )
        self._candidacy = candidacy
        self._place = candidacy.place
        self._transitions = taken.transitions
        self._acquired = taken.acquired
        # 0 after the Lease was deleted: the next renewal creates it.
        self._version = taken.version

    async def renew(self) -> None:
        """See Lease.renew."""
        if self._lost:
            raise self._deposed("others'")
        for _ in range(_TURNS_MAX):
            begun_s = self._clock()
            held = self._candidacy.holding(self._term, self._transitions, self._acquired)
            try:
                written = await self._place.write(self._version, *held)
            except (ApiConflictError, ApiNotFoundError):
                await self._look()
                continue
            self._version = written.metadata.version
            self.count_from(begun_s)
            return
        raise StoreError(
            f"kubernetes: another client changes the lease {self._key} again and again",
            slug="store-unsure",
        )

    async def end(self) -> None:
        """See HeldLease.end. A Lease that was deleted has no holding."""
        if not self._version:
            return
        with contextlib.suppress(ApiError):
            spec = {"holderIdentity": None, "leaseTransitions": self._transitions}
            await self._place.write(self._version, spec, {})

    async def _look(self) -> None:
        """After a conflicting write, read the lease; LeaseLostError if another process has it."""
        found = await self._place.find()
        if found is None:
            self._version = 0
            return
        if found.holder != self._candidacy.identity:
            raise self._deposed(found.holder or "a lease without a holder")
        self._version = found.metadata.version

    def _deposed(self, by: str) -> LeaseLostError:
        return self.deposed(by, self._place.api.access.where)
