"""A store over one register: a single value that can be read and conditionally replaced.

Owns the layout of that value: one document with every key, version and lease, which each write
replaces by compare-and-set. So any service that keeps one value with a fencing token (torch's
RendezvousBackend) becomes a store with elections. The calls of the register may block: each runs in
a thread, one at a time, within the bound.

Versions are one count over all writes, so they grow over deletion and re-creation. Each candidate
judges a lease by its own clock: one that was not renewed for its ttl may be taken. Taking and
renewing are the same conditional write, so one of them wins. The holder counts its ttl, less a
margin, from before it wrote.

It fails with StoreError when the register is out of reach or the outcome of a write is unknown, and
with ConfigurationError for a foreign value (nothing is ever unpickled) or one that is too large.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from elastane.errors import ConfigurationError, ElastaneError, LeaseLostError, StoreError
from elastane.process.offload import Offload
from elastane.protocol.limits import STORE_POLL_S, STORE_TIMEOUT_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.protocol import (
    STORE_VALUE_BYTES_MAX,
    ConflictError,
    Entry,
    HeldLease,
    Holder,
    boot_clock,
    check_key,
    check_ttl,
    check_value,
    watch_by_polling,
)

T = TypeVar("T")
# A job's keys take some 120 KB for 1,024 nodes; a larger register is not elastane's.
REGISTER_BYTES_MAX = 4 * STORE_VALUE_BYTES_MAX
# One of several writers wins each time, so this many lost races have another cause.
_RACES_MAX = 1000
_NONCE_BYTES = 9


class Register(Protocol):
    """One value with a fencing token; any call may block, and may raise anything."""

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the value and its token, None while there is no value."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the value if `token` is still its token (None: if there is no value yet).

        Returns the value that is there afterwards, its token, and whether it is the written one.
        """


class _Key(msgspec.Struct, array_like=True):
    value: bytes
    version: int


class _Lease(msgspec.Struct, array_like=True):
    """A lease: its latest holding (`value` is None once it was released) and its last renewal."""

    term: int = 0
    value: bytes | None = None
    ttl_s: float = 0.0
    beat: str = ""


class _Document(msgspec.Struct, tag="elastane-register-1"):
    """Everything in the register. Each write has a new `nonce`, so no two leave the same bytes."""

    count: int = 0
    nonce: str = ""
    keys: dict[str, _Key] = {}
    leases: dict[str, _Lease] = {}


@dataclass(frozen=True)
class _RegisterSighting:
    beat: str
    seen_s: float


class RegisterStore:
    """One process's view of the register. Nothing is read before the first operation."""

    def __init__(
        self,
        register: Register,
        name: str,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        poll_s: float = STORE_POLL_S,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.name = name
        self.clock = clock
        self._register = register
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._offload = Offload()
        self._turn = threading.Lock()
        self._sightings: dict[str, _RegisterSighting] = {}

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        check_key(key)
        return _entry(await self._read(), key)

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int, ttl_s: float | None = None
    ) -> Entry:
        """See Store.compare_and_set: what a register holds stays there."""
        check_key(key)
        check_value(key, value)

        def change(document: _Document) -> Entry:
            _expect(document, key, expected_version)
            document.keys[key] = _Key(value, document.count)
            return Entry(value, document.count)

        return await self.write(change)

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        check_key(key)

        def change(document: _Document) -> None:
            _expect(document, key, expected_version)
            if document.keys.pop(key, None) is None:
                raise ConflictError(key, expected_version, None)

        await self.write(change)

    async def lease(self, key: str, value: bytes, ttl_s: float) -> RegisterLease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        begun = self.clock()
        found = (await self._read()).leases.get(key)
        if found is not None and not self._is_free(key, found, begun):
            return None
        begun = self.clock()

        def take(document: _Document) -> _Lease | None:
            now = document.leases.get(key) or _Lease()
            if found is not None and (now.term, now.beat) != (found.term, found.beat):
                return None
            if found is None and now.value is not None:
                return None
            document.leases[key] = _Lease(now.term + 1, value, ttl_s, document.nonce)
            return document.leases[key]

        taken = await self.write(take)
        return RegisterLease(self, key, taken, begun) if taken is not None else None

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder. May name one that died up to a ttl ago, as seen by this process."""
        check_key(key)
        begun = self.clock()
        found = (await self._read()).leases.get(key)
        if found is None or found.value is None or self._is_free(key, found, begun):
            return None
        return Holder(found.value, found.term)

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease."""
        check_key(key)

        def free(document: _Document) -> None:
            found = document.leases.get(key)
            if found is not None and found.term == term:
                found.value = None

        await self.write(free)

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        return watch_by_polling(lambda: self.get(key), after_version, self._poll_s)

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        check_key(prefix)

        def change(document: _Document) -> None:
            document.keys = _without(document.keys, prefix)
            document.leases = _without(document.leases, prefix)

        await self.write(change)

    async def close(self) -> None:
        """See Store.close."""

    async def write(self, change: Callable[[_Document], T]) -> T:
        """Apply `change` to the current document, write it, and return what `change` returned.

        After each lost race `change` is called again with a fresh document, whose count is that of
        this write. Where it returns None and changed nothing, nothing is written. Raises StoreError
        after many lost races, or if the register is out of reach.
        """
        found = await self._call(self._register.get_state)
        for _ in range(_RACES_MAX):
            document = self._decode(found[0]) if found is not None else _Document()
            before = msgspec.msgpack.encode(document)
            document.count += 1
            document.nonce = secrets.token_urlsafe(_NONCE_BYTES)
            result = change(document)
            if result is None and _is_same(document, before):
                return result
            state, token = self._encode(document), found[1] if found is not None else None
            answer = await self._call(
                lambda s=state, t=token: self._register.set_state(s, t),  # type: ignore[misc]
                slug="store-unsure",
            )
            if answer is not None and (answer[2] or answer[0] == state):
                return result
            found = (answer[0], answer[1]) if answer is not None else None
            if found is None:
                found = await self._call(self._register.get_state)
        raise StoreError(
            f"register {self.name}: {_RACES_MAX} writes in a row lost to others",
            slug="store-unreachable",
            next_step="find the other writer to that register, which only this job may write",
        )

    async def _read(self) -> _Document:
        found = await self._call(self._register.get_state)
        return self._decode(found[0]) if found is not None else _Document()

    def _is_free(self, key: str, found: _Lease, begun_s: float) -> bool:
        """Whether `found` is released, or was seen without a renewal for its ttl."""
        if found.value is None:
            return True
        seen = self._sightings.get(key)
        if seen is None or seen.beat != found.beat:
            self._sightings[key] = _RegisterSighting(found.beat, self.clock())
            return False
        return begun_s - seen.seen_s >= found.ttl_s

    async def _call(self, call: Callable[[], T], slug: str = "store-unreachable") -> T:
        """Run one call of the register, which may block, in a thread and within the bound.

        `slug` is that of the error if the call fails: a register that fails may have written.
        """

        def alone() -> T:
            if not self._turn.acquire(timeout=self._timeout_s):
                raise TimeoutError
            try:
                return call()
            finally:
                self._turn.release()

        try:
            return await self._offload.run(alone, self._timeout_s)
        except TimeoutError as error:
            raise StoreError(
                f"register {self.name} did not answer within {self._timeout_s:g} s",
                slug="store-timeout",
                next_step="look at the server behind that rendezvous backend",
            ) from error
        except ElastaneError:
            raise
        except Exception as error:
            raise StoreError(
                f"register {self.name}: {type(error).__name__}: {error}",
                slug=slug,
                next_step="look at the server behind that rendezvous backend",
            ) from error

    def _decode(self, state: bytes) -> _Document:
        try:
            if len(state) > REGISTER_BYTES_MAX:
                raise ValueError(f"{len(state)} bytes, {REGISTER_BYTES_MAX} at most")
            return msgspec.msgpack.decode(state, type=_Document)
        except (*UNREADABLE, TypeError) as error:
            raise ConfigurationError(
                f"register {self.name} holds data of another program: {error}",
                slug="store-record",
                expected="a register that only agents of this version of elastane write to",
                next_step="another run id, or remove the value that another program left there",
            ) from error

    def _encode(self, document: _Document) -> bytes:
        state = msgspec.msgpack.encode(document)
        if len(state) > REGISTER_BYTES_MAX:
            raise ConfigurationError(
                f"register {self.name}: the value would have {len(state)} bytes",
                slug="store-value",
                expected=f"{REGISTER_BYTES_MAX} bytes at most, of all keys together",
            )
        return state


class RegisterLease(HeldLease):
    """A lease of a RegisterStore; the store makes it."""

    def __init__(self, store: RegisterStore, key: str, taken: _Lease, begun_s: float) -> None:
        super().__init__(key, taken.ttl_s, store.clock, term=taken.term, begun_s=begun_s)
        self._store = store

    async def renew(self) -> None:
        """See Lease.renew. A late renewal keeps its term: any other holding has a higher one."""
        begun_s = self._store.clock()

        def beat(document: _Document) -> None:
            found = document.leases.get(self._key)
            if self._lost or found is None or found.value is None or found.term != self.term:
                raise self._deposed(found)
            found.beat = document.nonce

        await self._store.write(beat)
        self.count_from(begun_s)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.end_lease(self._key, self.term)

    def _deposed(self, found: _Lease | None) -> LeaseLostError:
        now = f"term {found.term}" if found is not None else "no term at all"
        return self.deposed(now, f"register {self._store.name}")


def _entry(document: _Document, key: str) -> Entry | None:
    found = document.keys.get(key)
    return Entry(found.value, found.version) if found is not None else None


def _expect(document: _Document, key: str, expected_version: int) -> None:
    current = _entry(document, key)
    if (current.version if current else 0) != expected_version:
        raise ConflictError(key, expected_version, current)


def _without(table: dict[str, T], prefix: str) -> dict[str, T]:
    return {key: kept for key, kept in table.items() if not f"{key}/".startswith(f"{prefix}/")}


def _is_same(document: _Document, before: bytes) -> bool:
    old = msgspec.msgpack.decode(before, type=_Document)
    return (document.keys, document.leases) == (old.keys, old.leases)
