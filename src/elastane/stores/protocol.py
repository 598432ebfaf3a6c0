"""The Store: what a job needs of a place that outlives its coordinator.

Owns the protocol that every store implements, the values it speaks in, and the validation of
keys and values. Knows nothing of jobs, records or elections; `tests/conformance` holds every
store to what is promised here. How it fails: StoreError (out of reach, or the outcome of a write
unknown), ConflictError (somebody else wrote), LeaseLostError (somebody else holds the lease).

What each promise becomes in the stores that it is made for:

version
    etcd v3 mod_revision; etcd v2 modifiedIndex; Kubernetes metadata.resourceVersion as a number;
    file the number of the version's file.
compare_and_set
    etcd v3 a txn guarded by mod_revision (0 where the key is absent); etcd v2 a PUT with
    prevIndex, or prevExist=false; Kubernetes a PUT that carries resourceVersion (for 0: a POST),
    409 being the conflict; file a link(2) to the name of the next version.
delete
    the same guards on a delete (Kubernetes: preconditions.resourceVersion); file: the next
    version is a tombstone.
lease and term
    etcd v3 a key bound to a lease, and a counter beside it that outlives the lease, both in one
    txn; etcd v2 a key with a TTL, its createdIndex as the term, and the latest term beside it;
    Kubernetes a coordination.k8s.io Lease, every change guarded by resourceVersion, the one that
    a taking replaced as the term; file: term files and a heartbeat.
who judges that a lease has run out
    the server for etcd; each candidate by its own monotonic clock for Kubernetes and file.
watch
    etcd v3 a read, then from its revision on, and again when that ends (compaction among the
    reasons); etcd v2 the same with wait=true&waitIndex; Kubernetes list and watch, on 410 a list;
    file a read each STORE_POLL_S.

Versions grow over the whole life of a key's name, deletion and re-creation included: so it is
with all three servers, and the file store keeps a tombstone for it.

Fencing. No operation takes a term along, because Kubernetes has no transaction over two objects.
What makes a holder's writes safe is this: each write that matters goes through compare_and_set on
one key (`record`), and a new holder rewrites that key, under its own term, before it decides
anything. A predecessor that was stopped between its last look at the lease and its write then
either wrote before that (and its write is what the new holder reads) or gets a ConflictError.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from elastane.errors import ConfigurationError, StoreError
from elastane.protocol.limits import STORE_KEY_CHARS_MAX, STORE_VALUE_BYTES_MAX

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class Entry(msgspec.Struct, frozen=True):
    """A key's value, and the version that a compare_and_set on it must expect."""

    value: bytes
    version: int


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease: the value it gave, and its term."""

    value: bytes
    term: int


class ConflictError(StoreError):
    """The key is not at the version that was expected; `current` is what it is at."""

    def __init__(self, key: str, expected_version: int, current: Entry | None) -> None:
        found = f"version {current.version}" if current else "absent"
        wanted = f"version {expected_version}" if expected_version else "absent"
        super().__init__(f"store: {key} is {found}, not {wanted}", slug="store-conflict")
        self.key = key
        self.expected_version = expected_version
        self.current = current


class Lease(Protocol):
    """A lease that this process took; it may have lost it since."""

    @property
    def term(self) -> int:
        """The number of this holding: higher than that of every holding before it."""
        ...

    def remaining_s(self) -> float:
        """Seconds for which nobody else can have taken the lease; 0 or less: do not decide.

        By the holder's own clock, which counts the time the machine was suspended, from the
        beginning of the last renewal that succeeded, less a margin: so it runs out before
        anybody may take the lease, also when the holder's process was stopped meanwhile.
        """
        ...

    def held(self) -> bool:
        """Whether the holder may decide now: `remaining_s() > 0`."""
        ...

    async def renew(self) -> None:
        """Hold the lease for another ttl from now.

        Succeeds after the ttl too, if nobody held the lease in between; the term may then have
        grown (file, etcd: the lease is taken anew, and the counter shows that nobody came
        between). Raises LeaseLostError for good when somebody did, StoreError when the store is
        out of reach: then try again.
        """
        ...

    async def release(self) -> None:
        """Give the lease up: others may take it at once. Does nothing where it was lost."""
        ...


class Store(Protocol):
    """Keys with versions, leases and watches; every operation ends within the store's bound."""

    async def get(self, key: str) -> Entry | None:
        """Return the key's entry, or None where it is absent.

        Not older than any write that ended before, of any process.
        """
        ...

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """Write `value` if the key is at `expected_version` (0: absent), durably.

        Of several writers that expect the same version one succeeds. Raises ConflictError for
        the others. A StoreError leaves it open whether the write was or will be done; a later
        compare_and_set that succeeds settles it.

        With `ttl_s` the entry goes by itself that many seconds later, also when nobody is left
        to remove it, unless it was written again; a store without a server keeps it.
        """
        ...

    async def delete(self, key: str, expected_version: int) -> None:
        """Remove the key if it is at `expected_version`; else raise ConflictError."""
        ...

    async def lease(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        """Try once to take the lease; None where somebody else holds it, or might.

        A store without a server has to see a silent holder for the ttl before it may judge, so
        call it again and again: calls of the same store object add up.
        """
        ...

    async def holder(self, key: str) -> Holder | None:
        """Return who holds the lease as far as this process can tell, None where it is free."""
        ...

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """Yield the key's entry whenever its version is above the last one known.

        The last one known is at first `after_version` (0: none). Yields None once when a key
        of which a version was known is gone. May leave out versions in between, never the last
        one; goes on over deletion and re-creation. Raises StoreError when the store is out of
        reach; begin again from the last version seen. To be closed (`aclose`) by the task that
        iterates, for it may hold a connection.
        """
        ...

    async def purge(self, prefix: str) -> None:
        """Remove all keys and leases below `prefix`, and their history.

        Only for when nobody uses them: versions and terms begin anew.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; leases that are held run out."""
        ...


def check_key(key: str) -> str:
    """Return `key`, or raise ConfigurationError where it is no slash-separated name."""
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
    """Return `value`, or raise ConfigurationError where it is too large."""
    if len(value) > STORE_VALUE_BYTES_MAX:
        raise ConfigurationError(
            f"store: the value of {key} has {len(value)} bytes",
            slug="store-value",
            expected=f"{STORE_VALUE_BYTES_MAX} bytes at most",
        )
    return value


def check_ttl(key: str, ttl_s: float) -> float:
    """Return `ttl_s`, or raise ConfigurationError where it is no duration."""
    if not 0 < ttl_s < 86400:
        raise ConfigurationError(
            f"store: a lease of {ttl_s} s on {key}",
            slug="store-ttl",
            expected="more than 0 and less than 86400 s",
        )
    return ttl_s
