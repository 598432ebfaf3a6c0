"""Which agent's coordinator decides: taking the lease, keeping it, and writing under it.

Owns one candidate's way: campaign, then keep, then resign or be deposed. Knows nothing of what
a coordinator decides. Safety does not rest on the lease alone (its holder may be stopped between
looking at it and writing): a new holder first rewrites the job's record under its own term, and
from then on no predecessor's write can succeed (stores.protocol, Fencing).

    election = Election(JobKeys(store, job), node_id, spec, on_authority=...)
    record = await election.campaign()        # returns when this node holds the lease
    await election.publish(endpoint)
    await election.keep()                     # renews; raises LeaseLostError once deposed

How it fails: LeaseLostError, and nothing may be decided any more; StoreError while the store is
away, which `keep` bears and reports; RendezvousClosedError where the job has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from elastane.errors import LeaseLostError, StoreError
from elastane.process.endpoint import Endpoint
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.limits import OUTCOME_KEPT_S, SAVE_PATIENCE_S, STORE_POLL_S, look_s
from elastane.protocol.model import JobRecord, JobSpec
from elastane.stores.jobs import Filed, JobKeys, LeaderRecord
from elastane.stores.protocol import ConflictError, Lease

_log = logging.getLogger(__name__)
# Of two that want to write one key, one wins each time; more turns than this is no race.
_RACES_MAX = 100


class Election:
    """One agent's candidacy. `rng` spreads the candidates' looks at the lease."""

    def __init__(
        self,
        keys: JobKeys,
        node_id: str,
        spec: JobSpec,
        *,
        on_authority: Callable[[AuthorityChanged], None],
        rng: random.Random | None = None,
        patience_s: float = SAVE_PATIENCE_S,
    ) -> None:
        self.keys = keys
        self.node_id = node_id
        self._timing = spec.timing
        self._look_s = look_s(spec.max_nodes, spec.timing.lease_ttl_s / 2)
        self._on_authority = on_authority
        self._rng = rng or random.Random()
        self._patience_s = patience_s
        self._lease: Lease | None = None
        self._fenced_term = 0  # the term under which the record stands
        self._version = 0  # the record's
        self._record: JobRecord | None = None
        self._told_held = False
        self._renewing = asyncio.Lock()
        self._trouble = ""

    @property
    def term(self) -> int:
        """The term of the lease that this node has, 0 where it has none."""
        return self._lease.term if self._lease else 0

    def held(self) -> bool:
        """Return whether this node may decide at this moment."""
        lease = self._lease
        return lease is not None and lease.held() and lease.term == self._fenced_term

    async def campaign(self) -> JobRecord | None:
        """Take the lease as soon as it is free, and return the job's record as of then.

        Looks each STORE_POLL_S, less often where many may, give or take a fifth by chance; bears a
        store that is away.
        Raises RendezvousClosedError where the job has ended. Cancel it to withdraw.
        """
        assert self._lease is None, "a campaign of one who has the lease"
        self._fenced_term = 0
        while True:
            try:
                if await self._try_once():
                    self._tell(True, f"term {self.term} taken by node {self.node_id}")
                    return self._record
                self._note_trouble("")
            except StoreError as error:
                self._note_trouble(str(error))
            await asyncio.sleep(self._look_s * self._rng.uniform(0.8, 1.2))

    async def keep(self) -> None:
        """Renew the lease until it is lost: then raise LeaseLostError.

        While the store is away, tells so the moment the lease runs out, and goes on trying; tells
        again once the lease is held anew and nobody came between.
        """
        lease = self._have()
        while True:
            await asyncio.sleep(self._pause_s(lease))
            renewal = asyncio.ensure_future(self._renew(lease))
            try:
                await self._await_renewal(renewal, lease)
            finally:
                renewal.cancel()

    async def publish(self, endpoint: Endpoint) -> None:
        """Tell all agents where this node's coordinator listens; patient and strict as `save`."""

        async def once() -> None:
            for _ in range(_RACES_MAX):
                await self._assure()
                seat = LeaderRecord(term=self.term, node_id=self.node_id, endpoint=endpoint)
                known, version = await self.keys.seated()
                if known is not None and known.term > seat.term:
                    raise self._deposed(known.term)
                with contextlib.suppress(ConflictError):
                    await self.keys.store.compare_and_set(
                        self.keys.coordinator, msgspec.json.encode(seat), version
                    )
                    return
            raise self._deposed(self.term)

        await self._patiently(once)

    async def save(self, record: JobRecord) -> None:
        """Make the job's record durable under this node's term.

        Bears a store that is away for as long as the patience: nobody else may decide meanwhile,
        or that shows in the record. Raises LeaseLostError when this node may not decide (any
        more): nothing that depends on the record may then be sent.
        """

        async def once() -> None:
            await self._assure()
            await self._file(record)
            await self._assure()

        await self._patiently(once)

    async def load(self) -> JobRecord | None:
        """Return the job's record, whoever wrote it."""
        return await self.keys.load()

    async def locate(self) -> Endpoint | None:
        """See JobKeys.locate."""
        return await self.keys.locate()

    async def resign(self) -> None:
        """Give up the lease so that another may take it at once."""
        lease, self._lease = self._lease, None
        self._told_held = False
        if lease is not None:
            with contextlib.suppress(StoreError):  # then it runs out by itself
                await lease.release()

    async def _patiently(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write again until it is known to be done; a write that was done shows as our own."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                await write()
            except LeaseLostError:
                raise
            except StoreError as error:
                self._note_trouble(error.what)
                if time.monotonic() >= deadline_s:
                    raise self._cut_off(error) from error
            else:
                self._note_trouble("")
                return
            await asyncio.sleep(STORE_POLL_S)

    async def _try_once(self) -> bool:
        ttl_s = self._timing.lease_ttl_s
        lease = await self.keys.store.lease(self.keys.seat_lease, self.node_id.encode(), ttl_s)
        if lease is None:
            return False
        self._lease = lease
        try:
            await self.keys.check_open()
            await self._fence(lease)
        except BaseException:
            await self.resign()
            raise
        return True

    async def _fence(self, lease: Lease) -> None:
        """Rewrite the record under this term: no predecessor's write succeeds after it.

        Where this node held a term just before, the record must still stand under that one.
        """
        for _ in range(_RACES_MAX):
            filed, version = await self.keys.filed()
            found = filed.term if filed else 0
            mine = (self._fenced_term, lease.term)
            if found > lease.term or (self._fenced_term and found not in mine):
                raise self._deposed(found)
            self._record = filed.record if filed else None
            own = Filed(term=lease.term, record=self._record)
            with contextlib.suppress(ConflictError):
                entry = await self.keys.store.compare_and_set(
                    self.keys.record, msgspec.json.encode(own), version
                )
                self._version, self._fenced_term = entry.version, lease.term
                return
        raise self._deposed(lease.term)

    async def _file(self, record: JobRecord) -> None:
        content = msgspec.json.encode(Filed(term=self._fenced_term, record=record))
        kept_s = OUTCOME_KEPT_S if record.outcome is not None else None
        for _ in range(_RACES_MAX):
            try:
                entry = await self.keys.store.compare_and_set(
                    self.keys.record, content, self._version, kept_s
                )
            except ConflictError as conflict:
                self._version = self._own_version(conflict)
                continue
            self._version, self._record = entry.version, record
            return
        raise self._deposed(self.term)

    def _own_version(self, conflict: ConflictError) -> int:
        """Return the record's version where it is of our own term: a write whose reply was lost."""
        current = conflict.current
        term = self.keys.decode(current).term if current else 0
        if current is None or term != self._fenced_term:
            raise self._deposed(term) from conflict
        return current.version

    async def _assure(self) -> None:
        """Return while this node may decide, renewing if that is late.

        Raises LeaseLostError where it may not, StoreError where that is not known.
        """
        lease = self._have()
        if not self.held():
            await self._renew(lease)

    async def _renew(self, lease: Lease) -> None:
        async with self._renewing:  # keep() and save() may both find the lease late
            await lease.renew()
            if lease.term != self._fenced_term:  # taken anew, after it had run out
                await self._fence(lease)

    async def _await_renewal(self, renewal: asyncio.Future[None], lease: Lease) -> None:
        """Wait for a renewal, and tell when the lease runs out before it is done."""
        patience_s = max(lease.remaining_s(), 0.0) if self._told_held else None
        await asyncio.wait({renewal}, timeout=patience_s)
        if not renewal.done():
            self._tell(False, f"term {lease.term} could not be renewed: the store is silent")
            await asyncio.wait({renewal})
        error = renewal.exception()
        if isinstance(error, LeaseLostError):
            self._tell(False, error.what)
            raise error
        if isinstance(error, StoreError):
            if not self.held():
                self._tell(False, f"term {lease.term} could not be renewed: {error.what}")
        elif error is not None:
            raise error
        elif self.held():
            self._tell(True, f"term {lease.term} is held again, nobody came between")

    def _pause_s(self, lease: Lease) -> float:
        """Until the next renewal: never beyond the moment at which the lease's end is told."""
        pause_s = self._timing.lease_renew_s
        if not self._told_held:
            return min(pause_s, STORE_POLL_S)
        return max(0.0, min(pause_s, lease.remaining_s()))

    def _tell(self, held: bool, reason: str) -> None:
        if held != self._told_held:
            self._told_held = held
            self._on_authority(AuthorityChanged(held, reason))

    def _note_trouble(self, trouble: str) -> None:
        """Say once what keeps this candidate from the store, and once that it is over."""
        if trouble != self._trouble:
            _log.warning("election: %s", trouble or "the store answers again")
            self._trouble = trouble

    def _have(self) -> Lease:
        if self._lease is None:
            raise LeaseLostError(
                f"job {self.keys.job}: node {self.node_id} does not hold the lease",
                slug="lease-lost",
            )
        return self._lease

    def _cut_off(self, error: StoreError) -> LeaseLostError:
        return LeaseLostError(
            f"job {self.keys.job}: node {self.node_id} cannot decide under term {self.term}: "
            f"{error.what}",
            slug="lease-lost",
            next_step=error.next_step,
        )

    def _deposed(self, term: int) -> LeaseLostError:
        return LeaseLostError(
            f"job {self.keys.job}: node {self.node_id} of term {self.term} was deposed: "
            f"the record is of term {term}",
            slug="lease-lost",
        )
