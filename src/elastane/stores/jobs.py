"""The keys of one job in a store, and the encoding of their values.

Owns the keys below `<job>/`: `coordinator` (its address and term), `token` (the job's secret),
`record` (the durable state, under the term of its writer), and `leadership` (the lease of the
coordinator). It knows nothing of elections.

A finished job leaves its record, which holds the outcome, so that a late agent learns how the job
ended. A store with a server removes the record after OUTCOME_KEPT_S.

It fails with StoreError. An unreadable record is a ConfigurationError, since continuing without
it could commit a round twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastane.errors import ConfigurationError, JobClosedError
from elastane.process.endpoint import Endpoint
from elastane.process.files import safe_name
from elastane.protocol.model import JobRecord
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.protocol import ConflictError, Entry, Store

T = TypeVar("T")
_TOKEN_BYTES = 32
# The last part of the key of a job's token, the only confidential value in a store.
TOKEN_PART = "token"
# Agents that race to make the token or to clean up; one agent wins each turn of the loop.
_RACES_MAX = 1000


def new_token() -> str:
    """Return a secret for a job: 32 random bytes as hex."""
    return secrets.token_hex(_TOKEN_BYTES)


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the coordinator of a term."""

    term: int
    node_id: str
    endpoint: Endpoint


class Filed(msgspec.Struct, frozen=True, kw_only=True):
    """The record as it is stored, with its writer's term; None for a job without a record."""

    term: int
    record: JobRecord | None


# Made once: msgspec lays a type out when it first decodes it, and crashes if two threads do so at
# once (0.22), such as two agents in one process.
_filed = msgspec.json.Decoder(Filed).decode
_leader = msgspec.json.Decoder(LeaderRecord).decode


class JobNames:
    """The names of what one job keeps."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.prefix = safe_name(job)
        self.coordinator = f"{self.prefix}/coordinator"
        self.token_key = f"{self.prefix}/{TOKEN_PART}"
        self.record = f"{self.prefix}/record"
        self.leadership = f"{self.prefix}/leadership"


class JobKeys(JobNames):
    """The keys of one job in a store, for agents and the coordinator alike."""

    def __init__(self, store: Store, job: str) -> None:
        super().__init__(job)
        self.store = store
        # False for a job whose token was given to the agents: then the store has none to remove.
        self._has_token = False

    async def load(self) -> JobRecord | None:
        """Return the job's record, None while it has none."""
        filed, _ = await self.filed()
        return filed.record if filed else None

    async def filed(self) -> tuple[Filed | None, int]:
        """Return the record with its writer's term, and the version that a write must expect."""
        entry = await self.store.get(self.record)
        return (self.decode(entry), entry.version) if entry else (None, 0)

    def decode(self, entry: Entry) -> Filed:
        """Return the record in an entry of the key `record`."""
        return _decode(entry, _filed, self.record)

    async def check_open(self) -> None:
        """Raise JobClosedError, with the outcome, for a job that has ended."""
        record = await self.load()
        outcome = record.outcome if record else None
        if outcome is not None:
            raise JobClosedError(
                f"closed: job {self.job} has ended: {outcome.reason}",
                slug="rdzv-closed",
                expected="a --rdzv-id that no job has used in this store",
                next_step="start a new job under another id: elastane run --rdzv-id NAME ...",
            )

    async def token(self) -> str:
        """Return the job's secret, 32 random bytes as hex, which the first agent writes.

        Raises StoreError while the store is out of reach, JobClosedError for an ended job.
        """
        self._has_token = True
        for _ in range(_RACES_MAX):
            entry = await self.store.get(self.token_key)
            if entry is not None:
                return entry.value.decode()
            await self.check_open()
            made = new_token().encode()
            try:
                entry = await self.store.compare_and_set(self.token_key, made, 0)
            except ConflictError:
                continue
            return entry.value.decode()
        raise AssertionError("a token that appears and disappears for ever")

    async def leader(self) -> LeaderRecord | None:
        """Return the address that the latest coordinator published; it may be dead by now."""
        leader, _ = await self.published()
        return leader

    async def published(self) -> tuple[LeaderRecord | None, int]:
        """Return the coordinator's address, and the version that a write must expect."""
        entry = await self.store.get(self.coordinator)
        return (_decode(entry, _leader, self.coordinator), entry.version) if entry else (None, 0)

    async def locate(self) -> Endpoint | None:
        """Return the latest coordinator's address, None while there is none.

        Raises JobClosedError for a job that has ended.
        """
        if (leader := await self.leader()) is not None:
            return leader.endpoint
        await self.check_open()
        return None

    async def tidy(self) -> None:
        """Remove what only a running job needs: the address, the secret, the lease.

        Only for a job whose outcome is on record, by an agent that does not hold the lease any
        more.
        """
        for key in (self.coordinator, *((self.token_key,) if self._has_token else ())):
            for _ in range(_RACES_MAX):
                entry = await self.store.get(key)
                if entry is None:
                    break
                try:
                    await self.store.delete(key, entry.version)
                except ConflictError:
                    await asyncio.sleep(0)
        await self.store.purge(self.leadership)

    async def purge(self) -> None:
        """Remove everything of a job that has ended, its record included."""
        await self.store.purge(self.prefix)


def _decode(entry: Entry, decode: Callable[[bytes], T], key: str) -> T:
    try:
        return decode(entry.value)
    except UNREADABLE as error:
        raise ConfigurationError(
            f"store: {key} version {entry.version} cannot be read: {error}",
            slug="store-record",
            expected="what this version of elastane writes there",
            next_step="use the elastane version that began the job, or another --rdzv-id",
        ) from error
