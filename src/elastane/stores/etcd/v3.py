"""The store over etcd v3.

Owns how the Store's promises become transactions. A version is a mod_revision, a conditional write
a transaction with a guard on it. A lease is a key bound to an etcd lease. Beside it the key
`<lease>/term` outlives it, and its count of writes is the term. Knows nothing of jobs or
connections.

A lease of the server ends at the earliest its TTL after it was granted or renewed (the server
rounds up to whole seconds, 2 at least). Its holder counts the requested TTL, less a margin, from
before the request, so it always stops first. The server judges; no clocks are compared.

It fails as stores.protocol says; gateway says which StoreError means what.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec

from elastane.errors import LeaseLostError, StoreError
from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.etcd import wire
from elastane.stores.etcd.gateway import WATCH_SILENCE_S, Gateway
from elastane.stores.etcd.settings import EtcdSettings
from elastane.stores.protocol import (
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    watch_by_reading,
)

# The pause between two watches of a server that ends each immediately.
_WATCH_PAUSE_S = 0.1


class _Taken(NamedTuple):
    """A lease that was taken: the server's number for it, its term, and when it was requested."""

    lease: int
    term: int
    begun_s: float


class EtcdV3Store:
    """One process's view of the cluster. Nothing is sent before the first operation."""

    def __init__(self, settings: EtcdSettings, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.urls = settings.urls
        self.session = wire.GatewaySession(Gateway(settings, timeout_s=timeout_s))
        self._prefix = f"/{settings.prefix}/"

    def name(self, key: str) -> bytes:
        """Return the key's name in the server."""
        return (self._prefix + key).encode()

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        entry, _ = await self._read(key)
        return entry

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set."""
        check_key(key)
        check_value(key, value)
        lease = await self.grant(check_ttl(key, ttl_s)) if ttl_s is not None else 0
        name = self.name(key)
        done = await self.commit(
            wire.txn(
                [wire.is_(name, "mod", expected_version)],
                [wire.put(name, value, lease)],
                [wire.read(name)],
            )
        )
        if not done.succeeded:
            raise ConflictError(key, expected_version, _entry(_range(done, 0).first))
        return Entry(value, done.header.revision)

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        check_key(key)
        name = self.name(key)
        done = await self.commit(
            wire.txn(
                [wire.is_(name, "mod", expected_version)], [wire.remove(name)], [wire.read(name)]
            )
        )
        if not done.succeeded or not expected_version:
            current = None if done.succeeded else _entry(_range(done, 0).first)
            raise ConflictError(key, expected_version, current)

    async def lease(self, key: str, value: bytes, ttl_s: float) -> EtcdV3Lease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        entry, _ = await self._read(key)
        if entry is not None:
            return None
        taken = await self.take(key, value, ttl_s)
        return EtcdV3Lease(self, key, value, ttl_s, taken) if taken is not None else None

    async def take(
        self, key: str, value: bytes, ttl_s: float, after_term: int | None = None
    ) -> _Taken | None:
        """Take a lease if it is free, and if its latest term was `after_term` (None: any).

        Returns None otherwise. A grant whose transaction was lost ends by its TTL.
        """
        begun_s = boot_clock()
        lease = await self.grant(ttl_s)
        name = self.name(key)
        counter = _term(name)
        guards = [wire.is_(name, "create", 0)]
        if after_term is not None:
            guards.append(wire.is_(counter, "version", after_term))
        writes = [wire.put(name, value, lease), wire.put(counter, b"", prev_kv=True)]
        done = await self.commit(wire.txn(guards, writes, []))
        if not done.succeeded:
            await self.revoke(lease)
            return None
        before = done.responses[1].response_put.prev_kv if len(done.responses) > 1 else None
        return _Taken(lease, (before.version if before else 0) + 1, begun_s)

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder."""
        held, term = await self._held(key)
        return Holder(held.value, term) if held is not None else None

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease. Each holding has its own lease on the server."""
        held, found = await self._held(key)
        if held is not None and found == term:
            await self.revoke(held.lease)

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        return watch_by_reading(
            lambda: self._read(key), lambda revision: self._wait(key, revision), after_version
        )

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        check_key(prefix)
        name = self.name(prefix)
        # "0" is the byte after "/": all that begins with the prefix and a slash.
        below = wire.remove(name + b"/", name + b"0")
        await self.commit(wire.txn([], [wire.remove(name), below], []))

    async def close(self) -> None:
        """See Store.close."""
        await self.session.gateway.close()

    async def grant(self, ttl_s: float) -> int:
        """Grant a lease of the server of at least `ttl_s`, with no key bound to it yet."""
        granted = await self.session.call(
            "/lease/grant", {"TTL": str(math.ceil(ttl_s))}, wire.LeaseGrant, write=True
        )
        return granted.ID

    async def revoke(self, lease: int) -> None:
        """End a lease of the server, and remove the keys bound to it."""
        paths = ("/lease/revoke", "/kv/lease/revoke")  # etcd 3.4 and later; 3.3
        path = paths[self.session.root == "/v3beta"]
        await self.session.call(path, {"ID": str(lease)}, wire.LeaseGrant, write=True)

    async def commit(self, transaction: dict[str, object]) -> wire.Txn:
        """Run a transaction."""
        return await self.session.call("/kv/txn", transaction, wire.Txn, write=True)

    async def _held(self, key: str) -> tuple[wire.KeyValue | None, int]:
        """Return the key of a lease that is held, and the term of that holding."""
        check_key(key)
        name = self.name(key)
        done = await self.commit(wire.txn([], [wire.read(name), wire.read(_term(name))], []))
        held, term = _range(done, 0).first, _range(done, 1).first
        return (held, term.version) if held and term else (None, 0)

    async def _read(self, key: str) -> tuple[Entry | None, int]:
        """Return the key's entry, and the revision of that reading."""
        name = self.name(check_key(key))
        found = await self.session.call("/kv/range", {"key": name}, wire.KeyRange)
        return _entry(found.first), found.header.revision

    async def _wait(self, key: str, revision: int) -> None:
        """Wait for a change after `revision`, until the watch breaks, is silent or compacted."""
        name = base64.b64encode(self.name(key)).decode()
        request = {"create_request": {"key": name, "start_revision": str(revision + 1)}}
        session = self.session
        opened = session.gateway.stream(
            "POST",
            f"{session.root}/watch",
            silence_s=WATCH_SILENCE_S,
            content=msgspec.json.encode(request),
            headers=session.headers,
        )
        with contextlib.suppress(StoreError):  # The next read says whether the store is away.
            async with opened as lines:
                async for line in lines:
                    watched = _watched(line)
                    if watched is None or watched.canceled:
                        break
                    if watched.events:
                        return
        await asyncio.sleep(_WATCH_PAUSE_S)


class EtcdV3Lease(HeldLease):
    """A lease of an EtcdV3Store; the store makes it."""

    def __init__(
        self, store: EtcdV3Store, key: str, value: bytes, ttl_s: float, taken: _Taken
    ) -> None:
        super().__init__(key, ttl_s, boot_clock, term=taken.term, begun_s=taken.begun_s)
        self._store = store
        self._value = value
        self._id = taken.lease

    async def renew(self) -> None:
        """See Lease.renew."""
        if self._lost:
            raise self._deposed()
        begun_s = boot_clock()
        answer = await self._store.session.call(
            "/lease/keepalive", {"ID": str(self._id)}, wire.KeepAlive
        )
        if answer.result.TTL > 0:
            self.count_from(begun_s)
            return
        taken = await self._store.take(self._key, self._value, self._ttl_s, self._term)
        if taken is None:
            raise await self._why_not_taken()
        self._id = taken.lease
        self._term = taken.term
        self.count_from(taken.begun_s)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.revoke(self._id)

    async def _why_not_taken(self) -> StoreError:
        """Return the error of a lost lease, or of one whose key is not free yet."""
        holder = await self._store.holder(self._key)
        if holder is not None and holder.term == self._term and holder.value == self._value:
            return StoreError(
                f"etcd: the lease {self._key} ended and its key is still there",
                slug="store-unsure",
                next_step="nothing: it is tried again",
            )
        return self._deposed()

    def _deposed(self) -> LeaseLostError:
        return self.deposed("others'", f"servers {self._store.session.settings.names}")


def _term(name: bytes) -> bytes:
    return name + b"/term"


def _entry(found: wire.KeyValue | None) -> Entry | None:
    return Entry(found.value, found.mod_revision) if found is not None else None


def _watched(line: bytes) -> wire.WatchedKey | None:
    """Return the message of a watch; None for an error's body, or garbage."""
    try:
        return wire.decode(line, wire.WatchLine).result
    except UNREADABLE:
        return None


def _range(done: wire.Txn, place: int) -> wire.KeyRange:
    """Return the answer to a read within a transaction."""
    if place >= len(done.responses):
        raise StoreError(
            "etcd: the answer to a transaction lacks a value that it read", slug="store-refused"
        )
    return done.responses[place].response_range
