"""The Store: what a job needs of a service that outlives its coordinator.

Owns the protocol that every store implements, its values, and the checks of keys and values. It
knows nothing of jobs, records or elections; `tests/conformance` tests every promise on every store.
It fails with StoreError (the store is out of reach, or the outcome of a write is unknown),
ConflictError (another process wrote) and LeaseLostError (another process holds the lease).

How each store keeps each promise:

version
    etcd v3: mod_revision. etcd v2: modifiedIndex. Kubernetes: metadata.resourceVersion as a number.
    Redis: the server's time in microseconds. File: the number of the version's file.
compare_and_set
    etcd v3: a transaction guarded by mod_revision (0 for an absent key). etcd v2: a PUT with
    prevIndex, or prevExist=false. Kubernetes: a PUT with resourceVersion (for 0: a POST); 409 is
    the conflict. Redis: a script. File: a link(2) to the name of the next version.
delete
    The same guards on a delete (Kubernetes: preconditions.resourceVersion). File: the next version
    is a tombstone.
lease and term
    etcd v3: a key bound to a lease, and a counter that outlives the lease, both in one transaction.
    etcd v2: a key with a TTL, its createdIndex as the term, and the latest term in a second key.
    Kubernetes: a coordination.k8s.io Lease, every change guarded by resourceVersion; the term is
    the version that the new holder replaced. Redis: a key with an expiry, and the latest term in a
    second key. File: term files and a heartbeat.
expiry of a lease
    etcd and Redis: the server decides. Kubernetes and file: each candidate decides by its own
    monotonic clock.
watch
    etcd: a read after each change. v3 waits for the next one by a watch from the revision of the
    read, v2 by wait=true&waitIndex. Kubernetes: list and watch; on 410 another list. Redis and
    file: a read each STORE_POLL_S.

Versions grow over the whole life of a key's name, also over deletion and re-creation. The servers
do so by themselves; the file store keeps a tombstone for it.

Fencing. No operation carries a term, because Kubernetes has no transaction over two objects. A
holder's writes are safe for another reason. Each write that matters is a compare_and_set on one key
(`record`), and a new holder rewrites that key under its own term before it decides anything. A
former holder may have been stopped between its last look at the lease and its write. That write
either came first, and the new holder reads it, or it raises ConflictError.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import msgspec

from elastane.errors import ConfigurationError, LeaseLostError, StoreError
from elastane.protocol.limits import LEASE_MARGIN

# A store's value: the record of 1,024 nodes is some 120 KB; etcd refuses more than 1.5 MiB.
STORE_VALUE_BYTES_MAX = 1 << 20
STORE_KEY_CHARS_MAX = 512
# Attempts of a creation that is refused for a key that is absent when it is read. Each lost
# attempt takes a creation and a deletion by other clients within one round trip.
WRITE_ATTEMPTS_MAX = 20

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class Entry(msgspec.Struct, frozen=True):
    """The value of a key, and the version that a compare_and_set on it must expect."""

    value: bytes
    version: int


class Holder(msgspec.Struct, frozen=True):
    """The holder of a lease: the value that it gave, and its term."""

    value: bytes
    term: int


class ConflictError(StoreError):
    """The key is not at the expected version; `current` is its entry."""

    def __init__(self, key: str, expected_version: int, current: Entry | None) -> None:
        found = f"version {current.version}" if current else "absent"
        wanted = f"version {expected_version}" if expected_version else "absent"
        super().__init__(f"store: {key} is {found}, not {wanted}", slug="store-conflict")
        self.key = key
        self.expected_version = expected_version
        self.current = current


class Lease(Protocol):
    """A lease that this process took, and may have lost since."""

    @property
    def term(self) -> int:
        """The number of this holding; every holding before it had a lower one."""
        ...

    def remaining_s(self) -> float:
        """Seconds for which no other process can take the lease; at 0 or less, do not decide.

        Counted by the holder's own clock, which includes suspension, from the start of the last
        renewal that succeeded, less a margin. So it ends before another process may take the lease,
        also when the holder's process was stopped meanwhile.
        """
        ...

    def held(self) -> bool:
        """Return whether the holder may decide now: `remaining_s() > 0`."""
        ...

    async def renew(self) -> None:
        """Hold the lease for another ttl from now.

        Succeeds after the ttl too, if no other process held the lease meanwhile. The term may then
        have grown: file and etcd take the lease again, and their counter shows that no other
        holding came between. Raises LeaseLostError for good when another process held the lease,
        and StoreError while the store is out of reach: then try again.
        """
        ...

    async def release(self) -> None:
        """Give the lease up, so that others may take it at once; do nothing where it was lost."""
        ...


class Store(Protocol):
    """Keys with versions, leases and watches; every operation ends within the store's bound."""

    async def get(self, key: str) -> Entry | None:
        """Return the key's entry, or None for an absent key.

        The entry is at least as new as every write, by any process, that had ended before the call.
        """
        ...

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """Write `value` durably if the key is at `expected_version` (0: absent).

        Of several writers that expect the same version one succeeds; the others get ConflictError.
        After a StoreError the write may or may not be done, now or later. A later compare_and_set
        that succeeds shows which. With the slugs `store-unreachable`, `store-refused` and
        `store-busy` it is not done.

        With `ttl_s` the server removes the entry that many seconds later, unless it is written
        again. A store without a server keeps it.
        """
        ...

    async def delete(self, key: str, expected_version: int) -> None:
        """Remove the key if it is at `expected_version`; else raise ConflictError."""
        ...

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Try once to take the lease; return None where another process holds it, or might.

        A store without a server must see a silent holder for the ttl before it may judge. So call
        this repeatedly: calls on the same store object add up.
        """
        ...

    async def holder(self, key: str) -> Holder | None:
        """Return the holder of the lease as far as this process knows, None for a free lease."""
        ...

    async def end_lease(self, key: str, term: int) -> None:
        """End the holding of `term` now, as its holder's release does; no other holding is changed.

        For a holder whose process is known to have ended. If that was wrong, it is deposed: its
        next renewal raises LeaseLostError, unless no other holder took the lease meanwhile.
        """
        ...

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """Yield the key's entry whenever its version is above the last known one.

        The last known version is `after_version` at first (0: none). Yields None once when a key
        with a known version is gone. Versions in between may be left out, never the last one. The
        watch continues over deletion and re-creation. Raises StoreError when the store is out of
        reach: begin again from the last version seen. The task that iterates must close it
        (`aclose`), for it may hold a connection.
        """
        ...

    async def purge(self, prefix: str) -> None:
        """Remove all keys and leases below `prefix`, and their history.

        Only for keys that no process uses: versions and terms may start again.
        """
        ...

    async def close(self) -> None:
        """Close connections; leases that are held run out."""
        ...


def check_key(key: str) -> str:
    """Return `key`; ConfigurationError for one that is no slash-separated name."""
    parts = key.split("/")
    if len(key) > STORE_KEY_CHARS_MAX or not all(_PART.fullmatch(part) for part in parts):
        raise ConfigurationError(
            f"store: key {key[:80]!r} is not a name",
            slug="store-key",
            expected="parts of letters, digits, '.', '_' and '-', not beginning with '.', joined "
            f"by '/', {STORE_KEY_CHARS_MAX} characters at most",
        )
    return key


def check_value(key: str, value: bytes) -> bytes:
    """Return `value`; ConfigurationError for one that is too large."""
    if len(value) > STORE_VALUE_BYTES_MAX:
        raise ConfigurationError(
            f"store: the value of {key} has {len(value)} bytes",
            slug="store-value",
            expected=f"{STORE_VALUE_BYTES_MAX} bytes at most",
        )
    return value


def check_ttl(key: str, ttl_s: float) -> float:
    """Return `ttl_s`; ConfigurationError for what is no duration."""
    if not 0 < ttl_s < 86400:
        raise ConfigurationError(
            f"store: a lease of {ttl_s} s on {key}",
            slug="store-ttl",
            expected="more than 0 and less than 86400 s",
        )
    return ttl_s


def boot_clock() -> float:
    """Return seconds since boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldLease(ABC):
    """The holder's side of a lease: its term, and until when it may decide, by its own clock.

    The lease of a store derives from it, and is made once it was taken: `begun_s` is the moment at
    which that request was sent. After each renewal that succeeded it calls `count_from` with the
    moment of that request. `end` ends the holding in the store.
    """

    def __init__(
        self,
        key: str,
        ttl_s: float,
        clock: Callable[[], float],
        margin: float = LEASE_MARGIN,
        *,
        term: int,
        begun_s: float,
    ) -> None:
        self._key = key
        self._ttl_s = ttl_s
        self._clock = clock
        self._margin = margin
        self._term = term
        self._until_s = -math.inf
        self._lost = False
        self.count_from(begun_s)

    @property
    def term(self) -> int:
        """See Lease.term."""
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

    async def release(self) -> None:
        """See Lease.release. While the store is out of reach, the lease runs out by itself."""
        if self._lost:
            return
        self._lost = True
        with contextlib.suppress(StoreError):
            await self.end()

    @abstractmethod
    async def end(self) -> None:
        """End this holding in the store, and no later one; StoreError if it is out of reach."""

    def deposed(self, by: str, where: str = "") -> LeaseLostError:
        """Count the lease as lost for good, and return the error that names the new holder."""
        self._lost = True
        return LeaseLostError(
            f"lease {self._key}: term {self._term} was followed by {by}",
            slug="lease-lost",
            where=where,
        )


async def write_expecting(
    expected_version: int,
    write: Callable[[], Awaitable[Entry | None]],
    get: Callable[[], Awaitable[Entry | None]],
    key: str,
    service: str,
) -> Entry:
    """Return the entry that `write` made, for a store whose refusals do not hold the current one.

    `write` returns None if the key was not at `expected_version`. Then `get` reads the current
    entry, and ConflictError has it. The write is retried if it was to create the key (version 0)
    and the key is absent: another client deleted it in between. Raises StoreError after
    WRITE_ATTEMPTS_MAX of these; `service` is the name of the store in it.
    """
    for _ in range(WRITE_ATTEMPTS_MAX):
        written = await write()
        if written is not None:
            return written
        current = await get()
        if current is not None or expected_version:
            raise ConflictError(key, expected_version, current)
    raise StoreError(
        f"{service}: another client creates and deletes {key} again and again", slug="store-busy"
    )


def watch_by_polling(
    get: Callable[[], Awaitable[Entry | None]], after_version: int, pause_s: float
) -> AsyncGenerator[Entry | None, None]:
    """Yield what Store.watch promises, by polling, for a store that announces no changes."""

    async def read() -> tuple[Entry | None, int]:
        return await get(), 0

    return watch_by_reading(read, lambda _: asyncio.sleep(pause_s), after_version)


async def watch_by_reading(
    read: Callable[[], Awaitable[tuple[Entry | None, int]]],
    wait: Callable[[int], Awaitable[None]],
    after_version: int,
) -> AsyncGenerator[Entry | None, None]:
    """Yield what Store.watch promises, by a read after each wait for a change.

    `read` returns the key's entry and the newest version of the store at that time. `wait` returns
    after a change of the key with a greater version, or earlier.
    """
    known = after_version
    while True:
        entry, version = await read()
        if entry is not None and entry.version > known:
            known = entry.version
            yield entry
        elif entry is None and known:
            known = 0
            yield None
        await wait(max(version, known))
