"""A store in this process's memory, for tests and simulation, and as the shortest one to read.

`MemoryBackend` is the server, `MemoryStore` one client of it. The clock and the faults are
injected: a client can be out of reach, or lose the reply to a write that was done. The data dies
with the process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from elastane.errors import StoreError
from elastane.stores.protocol import (
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    check_key,
    check_ttl,
    check_value,
)


@dataclass
class _MemoryHolding:
    """A lease in the backend: its latest holding; `value` is None while it is free."""

    term: int = 0
    value: bytes | None = None
    until: float = 0.0


@dataclass
class MemoryBackend:
    """The data that all clients share. `clock` gives seconds and never goes back."""

    clock: Callable[[], float] = time.monotonic
    entries: dict[str, Entry] = field(default_factory=dict)
    leases: dict[str, _MemoryHolding] = field(default_factory=dict)
    # The time at which the backend removes an entry.
    expiry: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, key: str, value: bytes) -> Entry:
        """Store the next version of `key`."""
        entry = self.entries[key] = Entry(value, next(self._versions))
        self.announce()
        return entry

    def entry(self, key: str) -> Entry | None:
        """Return the current entry; None for one whose ttl has passed."""
        if self.clock() >= self.expiry.get(key, math.inf):
            self.entries.pop(key, None)
        return self.entries.get(key)

    def announce(self) -> None:
        """Wake every watcher."""
        self.changed.set()
        self.changed = asyncio.Event()

    def holding(self, key: str) -> _MemoryHolding:
        """Return the lease `key`, a free one where there is none yet."""
        return self.leases.setdefault(key, _MemoryHolding())


@dataclass
class StoreFaults:
    """The faults between one client and the backend."""

    unreachable: bool = False
    # This many writes are done, but answered with a StoreError.
    replies_to_lose: int = 0


class MemoryStore:
    """One client; `faults` may be changed at any time."""

    def __init__(self, backend: MemoryBackend, faults: StoreFaults | None = None) -> None:
        self.backend = backend
        self.faults = faults or StoreFaults()

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        check_key(key)
        await self.reach()
        return self.backend.entry(key)

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set."""
        check_key(key)
        check_value(key, value)
        until = math.inf if ttl_s is None else self.backend.clock() + check_ttl(key, ttl_s)
        await self.reach()
        self._expect(key, expected_version)
        entry = self.backend.put(key, value)
        self.backend.expiry[key] = until
        self._reply()
        return entry

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        check_key(key)
        await self.reach()
        self._expect(key, expected_version)
        if self.backend.entries.pop(key, None) is None:
            raise ConflictError(key, expected_version, None)
        self.backend.announce()
        self._reply()

    async def lease(self, key: str, value: bytes, ttl_s: float) -> MemoryLease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        await self.reach()
        found, now = self.backend.holding(key), self.backend.clock()
        if found.value is not None and now < found.until:
            return None
        found.term += 1
        found.value = value
        found.until = now + ttl_s
        self._reply()
        return MemoryLease(self, key, found.term, ttl_s)

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder."""
        check_key(key)
        await self.reach()
        found = self.backend.holding(key)
        if found.value is None or self.backend.clock() >= found.until:
            return None
        return Holder(found.value, found.term)

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease."""
        check_key(key)
        await self.reach()
        found = self.backend.holding(key)
        if found.term == term:
            found.value = None
            self.backend.announce()

    async def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        check_key(key)
        known = after_version
        while True:
            await self.reach()
            changed = self.backend.changed
            entry = self.backend.entry(key)
            if entry is not None and entry.version > known:
                known = entry.version
                yield entry
            elif entry is None and known:
                known = 0
                yield None
            else:
                await changed.wait()

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        check_key(prefix)
        await self.reach()
        for table in (self.backend.entries, self.backend.leases):
            for key in [key for key in table if f"{key}/".startswith(f"{prefix}/")]:
                del table[key]
        self.backend.announce()

    async def close(self) -> None:
        """See Store.close."""

    async def reach(self) -> None:
        """Yield to other tasks, as every operation does, and fail where a fault says so."""
        await asyncio.sleep(0)
        if self.faults.unreachable:
            raise StoreError("memory store: out of reach", slug="store-unreachable")

    def _expect(self, key: str, expected_version: int) -> None:
        current = self.backend.entry(key)
        if (current.version if current else 0) != expected_version:
            raise ConflictError(key, expected_version, current)

    def _reply(self) -> None:
        if self.faults.replies_to_lose > 0:
            self.faults.replies_to_lose -= 1
            raise StoreError("memory store: the reply was lost", slug="store-unsure")


class MemoryLease(HeldLease):
    """A lease of a MemoryStore."""

    def __init__(self, store: MemoryStore, key: str, term: int, ttl_s: float) -> None:
        clock = store.backend.clock
        super().__init__(key, ttl_s, clock, term=term, begun_s=clock())
        self._store = store

    async def renew(self) -> None:
        """See Lease.renew."""
        begun = self._store.backend.clock()
        await self._store.reach()
        found = self._store.backend.holding(self._key)
        if found.term != self._term or found.value is None:
            raise self.deposed(f"term {found.term}")
        found.until = self._store.backend.clock() + self._ttl_s
        self.count_from(begun)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.end_lease(self._key, self._term)
