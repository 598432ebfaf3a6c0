"""The election: taking the lease, renewing it, and writing under it.

Owns one candidate's way: campaign, keep the lease, then resign or be deposed. Safety does not rest
on the lease alone, since its holder may be stopped between checking it and writing. A new holder
first rewrites the job's record under its own term; after that no predecessor's write can succeed
(stores.protocol, Fencing).

    election = Election(JobKeys(store, job), node_id, spec, on_authority=...)
    record = await election.campaign()        # returns when this node holds the lease
    await election.publish(endpoint)
    await election.keep()                     # renews; raises LeaseLostError once deposed

It fails with LeaseLostError, after which this node may decide nothing; with StoreError while the
store is away, which `keep` survives and reports; with RendezvousClosedError if the job has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from elastane.errors import LeaseLostError, StoreError
from elastane.process.endpoint import Endpoint
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.limits import (
    ENDED_LEASE_S,
    OUTCOME_KEPT_S,
    SAVE_TIMEOUT_S,
    STORE_POLL_S,
    look_s,
)
from elastane.protocol.model import JobRecord, JobSpec
from elastane.stores import ConflictError, Filed, JobKeys, LeaderRecord, Lease

_log = logging.getLogger(__name__)
# Two writers of one key need few attempts, since one of them wins each time. More than this are no
# race.
_RACES_MAX = 100


class Election:
    """One agent's candidacy; `rng` spreads the candidates' polls of the lease."""

    def __init__(
        self,
        keys: JobKeys,
        node_id: str,
        spec: JobSpec,
        *,
        on_authority: Callable[[AuthorityChanged], None],
        rng: random.Random | None = None,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self.keys = keys
        self.node_id = node_id
        self._timing = spec.timing
        self._look_s = look_s(spec.max_nodes, spec.timing.lease_ttl_s / 2)
        self._on_authority = on_authority
        self._rng = rng or random.Random()
        self._timeout_s = timeout_s
        self._lease: Lease | None = None
        self._fenced_term = 0  # the term under which the record was last rewritten
        self._version = 0  # of the record
        self._record: JobRecord | None = None
        self._reported_held = False
        self._renewing = asyncio.Lock()
        self._problem = ""
        # Where connections to the last coordinator are refused, and whether to end its lease.
        self._refused: Endpoint | None = None
        self._must_end = asyncio.Event()

    @property
    def term(self) -> int:
        """The term of the lease that this node holds, 0 without one."""
        return self._lease.term if self._lease else 0

    def held(self) -> bool:
        """Return whether this node may decide at this moment."""
        lease = self._lease
        return lease is not None and lease.held() and lease.term == self._fenced_term

    def note_refusal(self, endpoint: Endpoint) -> None:
        """Record that connections to the coordinator at `endpoint` are refused: it has ended.

        The campaign then ends its lease, if it published that address in its term. If it is alive,
        its next renewal and its next write fail, so two coordinators never decide.
        """
        if endpoint != self._refused:
            self._refused = endpoint
            if self._timing.lease_ttl_s <= ENDED_LEASE_S:
                self._must_end.set()

    def is_refused(self, endpoint: Endpoint) -> bool:
        """Return whether connections to a coordinator at `endpoint` are refused."""
        return endpoint == self._refused

    def forget_refusal(self) -> None:
        """Record that this node has a session with a coordinator."""
        self._refused = None
        self._must_end.clear()

    async def campaign(self) -> JobRecord | None:
        """Take the lease as soon as it is free, and return the job's record as of then.

        Polls every STORE_POLL_S, give or take a fifth by chance, and less often in a large job.
        Retries while the store is away. Raises RendezvousClosedError if the job has ended. Cancel
        it to withdraw.
        """
        assert self._lease is None, "a campaign of one who has the lease"
        self._fenced_term = 0
        while True:
            try:
                if await self._try_once():
                    self._report(True, f"term {self.term} taken by node {self.node_id}")
                    return self._record
                self._log_problem("")
            except StoreError as error:
                self._log_problem(str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s * self._rng.uniform(0.8, 1.2)):
                    await self._must_end.wait()

    async def keep(self) -> None:
        """Renew the lease until it is lost, then raise LeaseLostError.

        While the store is away, reports lost authority the moment the lease runs out, and retries.
        Reports authority again once it holds the lease and no other node held it meanwhile.
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
        """Publish where this node's coordinator listens; retries and fails as `save` does."""

        async def once() -> None:
            for _ in range(_RACES_MAX):
                await self._assure()
                leader = LeaderRecord(term=self.term, node_id=self.node_id, endpoint=endpoint)
                known, version = await self.keys.published()
                if known is not None and known.term > leader.term:
                    raise self._deposed(known.term)
                with contextlib.suppress(ConflictError):
                    await self.keys.store.compare_and_set(
                        self.keys.coordinator, msgspec.json.encode(leader), version
                    )
                    return
            raise self._deposed(self.term)

        await self._with_retries(once)

    async def save(self, record: JobRecord) -> None:
        """Make the job's record durable under this node's term.

        Retries while the store is away, for the timeout: no other node may decide meanwhile, or the
        record shows it. Raises LeaseLostError if this node may not decide; then nothing that
        depends on the record may be sent.
        """

        async def once() -> None:
            await self._assure()
            await self._file(record)
            await self._assure()

        await self._with_retries(once)

    async def load(self) -> JobRecord | None:
        """Return the job's record, whichever node wrote it."""
        return await self.keys.load()

    async def locate(self) -> Endpoint | None:
        """See JobKeys.locate."""
        return await self.keys.locate()

    async def resign(self) -> None:
        """Release the lease, so that another node may take it at once."""
        lease, self._lease = self._lease, None
        self._reported_held = False
        if lease is not None:
            with contextlib.suppress(StoreError):  # then the lease runs out
                await lease.release()

    async def _with_retries(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retry a write until it is known to have succeeded, perhaps in an earlier attempt."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        while True:
            try:
                await write()
            except LeaseLostError:
                raise
            except StoreError as error:
                self._log_problem(error.what)
                if loop.time() >= deadline_s:
                    raise self._store_silent(error) from error
            else:
                self._log_problem("")
                return
            await asyncio.sleep(STORE_POLL_S)

    async def _try_once(self) -> bool:
        lease = await self._take()
        if lease is None and await self._end_refused():
            lease = await self._take()
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

    async def _take(self) -> Lease | None:
        ttl_s = self._timing.lease_ttl_s
        return await self.keys.store.lease(self.keys.leadership, self.node_id.encode(), ttl_s)

    async def _end_refused(self) -> bool:
        """End the lease of a coordinator that refuses connections; return whether there is one."""
        if not self._must_end.is_set():
            return False
        self._must_end.clear()
        leader = await self.keys.leader()
        if leader is None or not self.is_refused(leader.endpoint):
            return False
        await self.keys.store.end_lease(self.keys.leadership, leader.term)
        return True

    async def _fence(self, lease: Lease) -> None:
        """Rewrite the record under this term, so that no predecessor's write succeeds after it.

        If this node held a term just before, the record must still stand under that one.
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
        """Return the record's version if our own term wrote it and the reply was lost."""
        current = conflict.current
        term = self.keys.decode(current).term if current else 0
        if current is None or term != self._fenced_term:
            raise self._deposed(term) from conflict
        return current.version

    async def _assure(self) -> None:
        """Return if this node may decide, after renewing a late lease.

        Raises LeaseLostError if it may not, StoreError if that is not known.
        """
        lease = self._have()
        if not self.held():
            await self._renew(lease)

    async def _renew(self, lease: Lease) -> None:
        async with self._renewing:  # keep() and save() may both find the lease late
            await lease.renew()
            if lease.term != self._fenced_term:  # taken again after it had run out
                await self._fence(lease)

    async def _await_renewal(self, renewal: asyncio.Future[None], lease: Lease) -> None:
        """Wait for a renewal, and report when the lease runs out before it is done."""
        timeout_s = max(lease.remaining_s(), 0.0) if self._reported_held else None
        await asyncio.wait({renewal}, timeout=timeout_s)
        if not renewal.done():
            self._report(False, f"term {lease.term} could not be renewed: the store is silent")
            await asyncio.wait({renewal})
        error = renewal.exception()
        if isinstance(error, LeaseLostError):
            self._report(False, error.what)
            raise error
        if isinstance(error, StoreError):
            if not self.held():
                self._report(False, f"term {lease.term} could not be renewed: {error.what}")
        elif error is not None:
            raise error
        elif self.held():
            self._report(
                True, f"term {lease.term} is held again, no other coordinator led meanwhile"
            )

    def _pause_s(self, lease: Lease) -> float:
        """Return the pause until the next renewal, never beyond the end of the lease."""
        pause_s = self._timing.lease_renew_s
        if not self._reported_held:
            return min(pause_s, STORE_POLL_S)
        return max(0.0, min(pause_s, lease.remaining_s()))

    def _report(self, held: bool, reason: str) -> None:
        if held != self._reported_held:
            self._reported_held = held
            self._on_authority(AuthorityChanged(held, reason))

    def _log_problem(self, problem: str) -> None:
        """Log once why this candidate cannot use the store, and once that it can again."""
        if problem != self._problem:
            _log.warning("election: %s", problem or "the store answers again")
            self._problem = problem

    def _have(self) -> Lease:
        if self._lease is None:
            raise LeaseLostError(
                f"job {self.keys.job}: node {self.node_id} does not hold the lease",
                slug="lease-lost",
            )
        return self._lease

    def _store_silent(self, error: StoreError) -> LeaseLostError:
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
