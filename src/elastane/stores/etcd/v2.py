"""The store over etcd v2, for servers that still speak it (`--enable-v2`; gone with etcd 3.6).

Owns how the Store's promises become v2's conditional requests: a version is a modifiedIndex, a
lease a key with a TTL whose createdIndex is the term. v2 has no transactions. So a second key,
`<lease>~last`, holds the term of the latest holder and is changed by compare-and-swap: a holder
whose key ran out learns from it whether another holding came between. Values are base64, as v2
keeps text. A slash in a key is written `~`: v2 never removes an empty folder, so a job has none.

It fails as stores.protocol says, and with ConfigurationError for a server without the v2 API.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec

from elastane.errors import ConfigurationError, LeaseLostError, StoreError
from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.etcd.gateway import WATCH_SILENCE_S, EtcdAnswer, Gateway, trouble_of
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
    write_expecting,
)

_NOT_FOUND = 100
# Compare failed; not a file; already exists.
_CONFLICTS = (101, 102, 105)
_WATCH_PAUSE_S = 0.1


class EtcdNode(msgspec.Struct):
    """A key, or the folder of keys."""

    key: str = ""
    value: str = ""
    createdIndex: int = 0  # noqa: N815 - the server's spelling
    modifiedIndex: int = 0  # noqa: N815
    nodes: list[EtcdNode] = []


class Reply(msgspec.Struct):
    """The server's answer: about a key, or an error."""

    node: EtcdNode | None = None
    errorCode: int = 0  # noqa: N815
    message: str = ""
    cause: str = ""


class _TakenKey(NamedTuple):
    """A lease that was taken: its term, the index of its key, and when it was requested."""

    term: int
    written_index: int
    begun_s: float


class EtcdV2Store:
    """One process's view of the cluster. Nothing is sent before the first operation."""

    def __init__(self, settings: EtcdSettings, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.urls = settings.urls
        self.gateway = Gateway(settings, timeout_s=timeout_s)
        self._folder = f"/v2/keys/{settings.prefix}"
        login = f"{settings.user}:{settings.password}".encode()
        basic = "Basic " + base64.b64encode(login).decode()
        self._headers = {"Authorization": basic} if settings.user else {}

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
        form = _guard(expected_version) | {"value": base64.b64encode(value).decode()}
        # An empty TTL removes that of the key.
        form["ttl"] = "" if ttl_s is None else str(math.ceil(check_ttl(key, ttl_s)))

        async def write() -> Entry | None:
            reply, _ = await self.ask("PUT", key, data=form)
            return Entry(value, reply.node.modifiedIndex) if reply.node is not None else None

        return await write_expecting(expected_version, write, lambda: self.get(key), key, "etcd")

    async def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        check_key(key)
        if not expected_version:
            raise ConflictError(key, expected_version, await self.get(key))
        reply, _ = await self.ask("DELETE", key, params=_guard(expected_version))
        if reply.node is None:
            raise ConflictError(key, expected_version, await self.get(key))

    async def lease(self, key: str, value: bytes, ttl_s: float) -> EtcdV2Lease | None:
        """See Store.lease."""
        check_key(key)
        check_value(key, value)
        check_ttl(key, ttl_s)
        if await self.get(key) is not None:
            return None
        taken = await self.take(key, value, ttl_s)
        return EtcdV2Lease(self, key, value, ttl_s, taken) if taken is not None else None

    async def take(
        self, key: str, value: bytes, ttl_s: float, after_term: int | None = None
    ) -> _TakenKey | None:
        """Take a lease if it is free, and if its latest term was `after_term` (None: any)."""
        last_key = f"{key}~last"
        reply, _ = await self.ask("GET", last_key, params={"quorum": "true"})
        last = reply.node
        if after_term is not None and (last is None or last.value != str(after_term)):
            return None
        begun_s = boot_clock()
        reply, _ = await self.ask("PUT", key, data=_guard(0) | _lease_form(value, ttl_s))
        if reply.node is None:
            return None
        taken = reply.node
        form = _guard(last.modifiedIndex if last else 0) | {"value": str(taken.createdIndex)}
        noted, _ = await self.ask("PUT", last_key, data=form)
        if noted.node is None:  # Our key ran out meanwhile, and another process took it.
            await self.ask("DELETE", key, params=_guard(taken.modifiedIndex))
            return None
        return _TakenKey(taken.createdIndex, taken.modifiedIndex, begun_s)

    async def holder(self, key: str) -> Holder | None:
        """See Store.holder."""
        check_key(key)
        reply, _ = await self.ask("GET", key, params={"quorum": "true"})
        entry = _entry(reply.node)
        return Holder(entry.value, reply.node.createdIndex) if entry and reply.node else None

    async def end_lease(self, key: str, term: int) -> None:
        """See Store.end_lease. A holder that renews it just now is alive, and keeps it."""
        check_key(key)
        reply, _ = await self.ask("GET", key, params={"quorum": "true"})
        if reply.node is not None and reply.node.createdIndex == term:
            await self.ask("DELETE", key, params=_guard(reply.node.modifiedIndex))

    def watch(self, key: str, after_version: int) -> AsyncGenerator[Entry | None, None]:
        """See Store.watch."""
        return watch_by_reading(
            lambda: self._read(key), lambda index: self._wait(key, index), after_version
        )

    async def purge(self, prefix: str) -> None:
        """See Store.purge."""
        check_key(prefix)
        reply, _ = await self.ask("GET", "", params={"quorum": "true"})
        flat = _flat(prefix)
        for node in reply.node.nodes if reply.node else []:
            name = node.key.rpartition("/")[2]
            if name == flat or name.startswith(f"{flat}~"):
                await self.ask("DELETE", name, params={})

    async def close(self) -> None:
        """See Store.close."""
        await self.gateway.close()

    async def ask(self, method: str, key: str, **what: Any) -> tuple[Reply, int]:
        """Return the reply and the store's index; a reply without a node: absent, or a conflict."""
        path = f"{self._folder}/{_flat(key)}" if key else self._folder
        answer = await self.gateway.ask(
            method, path, write=method != "GET", headers=self._headers, **what
        )
        reply = self._decode(answer)
        if answer.status >= 400 and reply.errorCode not in (_NOT_FOUND, *_CONFLICTS):
            raise self._refused(answer)
        if answer.status >= 400:
            reply.node = None
        return reply, answer.index

    async def _read(self, key: str) -> tuple[Entry | None, int]:
        """Return the key's entry, and the store's index as of that reading."""
        reply, index = await self.ask("GET", check_key(key), params={"quorum": "true"})
        return _entry(reply.node), index

    async def _wait(self, key: str, index: int) -> None:
        """Wait for a change after `index`, for WATCH_SILENCE_S at most."""
        opened = self.gateway.stream(
            "GET",
            f"{self._folder}/{_flat(key)}",
            silence_s=WATCH_SILENCE_S,
            params={"wait": "true", "waitIndex": str(index + 1)},
            headers=self._headers,
        )
        with contextlib.suppress(StoreError):  # The next read says whether the store is away.
            async with opened as lines:
                async for _ in lines:
                    return
        await asyncio.sleep(_WATCH_PAUSE_S)

    def _decode(self, answer: EtcdAnswer) -> Reply:
        try:
            return msgspec.json.decode(answer.content, type=Reply)
        except UNREADABLE:
            if answer.status != 404:
                raise self._refused(answer) from None
        raise ConfigurationError(
            f"the server at {answer.url} does not speak etcd v2",
            slug="etcd-version",
            where=f"servers {self.gateway.settings.names}",
            expected="etcd before 3.6, started with --enable-v2",
            next_step="--rdzv-backend etcd, which speaks v3",
        )

    def _refused(self, answer: EtcdAnswer) -> StoreError | ConfigurationError:
        return self.gateway.refused(answer, trouble_of(answer.content))


class EtcdV2Lease(HeldLease):
    """A lease of an EtcdV2Store; the store makes it."""

    def __init__(
        self, store: EtcdV2Store, key: str, value: bytes, ttl_s: float, taken: _TakenKey
    ) -> None:
        super().__init__(key, ttl_s, boot_clock, term=taken.term, begun_s=taken.begun_s)
        self._store = store
        self._value = value
        self._index = taken.written_index

    async def renew(self) -> None:
        """See Lease.renew."""
        if self._lost:
            raise self._deposed()
        begun_s = boot_clock()
        # An update keeps createdIndex; the guard is on the index that this holder wrote last.
        form = _guard(self._index) | _lease_form(self._value, self._ttl_s)
        reply, _ = await self._store.ask("PUT", self._key, data=form)
        if reply.node is not None:
            self._index = reply.node.modifiedIndex
            self.count_from(begun_s)
            return
        found, _ = await self._store.ask("GET", self._key, params={"quorum": "true"})
        if found.node is not None and found.node.createdIndex == self._term:
            self._index = found.node.modifiedIndex  # A renewal whose reply was lost.
            raise StoreError(
                f"etcd: {self._key} was renewed, and the reply lost",
                slug="store-unsure",
                next_step="nothing: it is tried again",
            )
        if found.node is not None:
            raise self._deposed()
        taken = await self._store.take(self._key, self._value, self._ttl_s, self._term)
        if taken is None:
            raise self._deposed()
        self._term = taken.term
        self._index = taken.written_index
        self.count_from(taken.begun_s)

    async def end(self) -> None:
        """See HeldLease.end."""
        await self._store.ask("DELETE", self._key, params=_guard(self._index))

    def _deposed(self) -> LeaseLostError:
        return self.deposed("others'", f"servers {self._store.gateway.settings.names}")


def _lease_form(value: bytes, ttl_s: float) -> dict[str, str]:
    return {"value": base64.b64encode(value).decode(), "ttl": str(math.ceil(ttl_s))}


def _guard(version: int) -> dict[str, str]:
    # prevIndex=0 would match any index.
    return {"prevIndex": str(version)} if version else {"prevExist": "false"}


def _flat(key: str) -> str:
    return key.replace("/", "~")


def _entry(node: EtcdNode | None) -> Entry | None:
    if node is None:
        return None
    try:
        return Entry(base64.b64decode(node.value, validate=True), node.modifiedIndex)
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(
            f"etcd: {node.key} holds data of another program: {node.value[:40]!r}",
            slug="store-record",
            expected="a key that only elastane writes",
            next_step="another etcd_prefix in --rdzv-conf",
        ) from error
