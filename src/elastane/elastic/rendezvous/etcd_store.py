"""A client of etcd for threads, and a torch store in etcd for agents that share nothing else.

The client owns an event loop in a daemon thread, which the first call starts; a forked child gets a
new one. It fails as elastane's stores do, with StoreError or ConflictError, never TimeoutError. In
the torch store each key, which may be any text, becomes one name below a prefix. Waiting uses a
watch; LookupError if a key did not come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import os
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from elastane.elastic.rendezvous.api import RendezvousError, RendezvousParameters
from elastane.errors import ElastaneError
from elastane.stores import ConflictError, Entry, Store, make_store
from elastane.stores.etcd import CONF_KEYS, read_settings

T = TypeVar("T")
# A name has at most 200 characters; a longer key is replaced by its digest.
_NAME_CHARS_MAX = 180


class StoreClient:
    """A store for use from threads. `open_store` makes one for a loop, and may be called again."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self.open_store = open_store
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: Store | None = None

    def get(self, key: str) -> Entry | None:
        """See Store.get."""
        return self._run(lambda store: store.get(key))

    def compare_and_set(self, key: str, value: bytes, expected_version: int) -> Entry:
        """See Store.compare_and_set."""
        return self._run(lambda store: store.compare_and_set(key, value, expected_version))

    def delete(self, key: str, expected_version: int) -> None:
        """See Store.delete."""
        self._run(lambda store: store.delete(key, expected_version))

    def await_entry(self, key: str, timeout_s: float) -> Entry | None:
        """Return the key's entry as soon as it exists, None after `timeout_s`."""

        async def wait(store: Store) -> Entry | None:
            try:
                async with (
                    asyncio.timeout(timeout_s),
                    contextlib.aclosing(store.watch(key, 0)) as watch,
                ):
                    async for entry in watch:
                        if entry is not None:
                            return entry
            except TimeoutError:
                return None
            return None

        return self._run(wait)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            loop, store = self._loop, self._store
            self._loop = self._store = None
        if loop is not None and store is not None and self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(store.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _run(self, call: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        loop, store = self._begin()
        return asyncio.run_coroutine_threadsafe(call(store), loop).result()

    def _begin(self) -> tuple[asyncio.AbstractEventLoop, Store]:
        with self._lock:
            if self._loop is None or self._store is None or self._pid != os.getpid():
                self._loop, self._store = asyncio.new_event_loop(), self.open_store()
                self._pid = os.getpid()
                threading.Thread(
                    target=self._loop.run_forever, name="elastane-store", daemon=True
                ).start()
            return self._loop, self._store


class EtcdClient(StoreClient):
    """A client of one etcd: `endpoint` and `conf` as in --rdzv-endpoint and --rdzv-conf."""

    def __init__(self, endpoint: str, conf: dict[str, str], backend: str = "etcd") -> None:
        self.endpoint = endpoint
        self.conf = conf
        self.backend = backend
        super().__init__(self.opener())

    def delete(
        self,
        key: str,
        expected_version: int | None = None,
        *,
        recursive: bool = False,
        dir: bool = False,
    ) -> None:
        """Remove a key, or with `recursive` all keys below it; see Store.delete.

        Without a version it is removed whatever its value, as python-etcd's client does.
        """
        del dir  # etcd v3 has no folders: `recursive` removes the keys below a key.
        if recursive:
            self._run(lambda store: store.purge(key.strip("/")))
            self._remove(key.strip("/"))
        elif expected_version is not None:
            super().delete(key, expected_version)
        else:
            self._remove(key.strip("/"))

    def _remove(self, key: str) -> None:
        while (found := self.get(key)) is not None:
            with contextlib.suppress(ConflictError):
                super().delete(key, found.version)
                return

    def opener(self, prefix: str = "") -> Callable[[], Store]:
        """Return a function that opens this etcd, with all keys below `prefix` if one is given."""
        conf = {**self.conf, "etcd_prefix": prefix} if prefix else self.conf
        return lambda: make_store(self.backend, self.endpoint, conf)


def etcd_client(params: RendezvousParameters, backend: str) -> EtcdClient:
    """Return a client of the etcd in `params`; RendezvousError if they are invalid."""
    conf = {key: str(params.config[key]) for key in CONF_KEYS if params.config.get(key)}
    try:
        read_settings(params.endpoint, conf)
    except ElastaneError as error:
        raise RendezvousError(str(error)) from error
    return EtcdClient(params.endpoint, conf, backend)


class EtcdStore(TorchStore):
    """A torch store. `etcd_client` is that of `EtcdServer.get_client()`, or of a handler."""

    timeout: datetime.timedelta  # torch's own property, which its stubs lack

    def __init__(
        self,
        etcd_client: StoreClient,
        etcd_store_prefix: str,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        super().__init__()
        self.client = etcd_client
        self.prefix = etcd_store_prefix.strip("/")
        if timeout is not None:
            self.set_timeout(timeout)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Write a key."""
        self._change(key, lambda _: _bytes(value))

    def get(self, key: str | bytes) -> bytes:
        """Return a key's value; wait for it within the store's timeout."""
        found = self.client.await_entry(self._name(key), self.timeout.total_seconds())
        if found is None:
            raise LookupError(f"store: {key!r} did not come within {self.timeout}")
        return found.value

    def add(self, key: str | bytes, num: int) -> int:
        """Add to a counter, which begins at 0, and return its new value."""
        return int(
            self._change(key, lambda found: str(int(found.value if found else 0) + num).encode())
        )

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value is `expected` (empty: missing); return the result."""

        def change(found: Entry | None) -> bytes:
            if found is None:
                return _bytes(desired) if not expected else _bytes(expected)
            return _bytes(desired) if found.value == _bytes(expected) else found.value

        found = self.client.get(self._name(key))
        if found is None and expected:
            return _bytes(expected)
        return self._change(key, change)

    def wait(self, keys: list[str], override_timeout: datetime.timedelta | None = None) -> None:
        """Wait for all of `keys`; LookupError if they do not exist in time."""
        timeout = self.timeout if override_timeout is None else override_timeout
        deadline_s = time.monotonic() + timeout.total_seconds()
        for key in keys:
            left_s = max(0.0, deadline_s - time.monotonic())
            is_there = self.client.get(self._name(key)) is not None
            if not is_there and self.client.await_entry(self._name(key), left_s) is None:
                raise LookupError(f"store: {key!r} did not come within {timeout}")

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` exist."""
        return all(self.client.get(self._name(key)) is not None for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`; wait for each."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write `keys`, one after another."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        while (found := self.client.get(self._name(key))) is not None:
            try:
                self.client.delete(self._name(key), found.version)
            except ConflictError:
                continue
            return True
        return False

    def _change(self, key: str | bytes, change: Callable[[Entry | None], bytes]) -> bytes:
        """Replace a value by the result of `change`; retry until no other write came between."""
        name = self._name(key)
        found = self.client.get(name)
        while True:
            value = change(found)
            try:
                version = found.version if found else 0
                return self.client.compare_and_set(name, value, version).value
            except ConflictError as conflict:
                found = conflict.current

    def _name(self, key: str | bytes) -> str:
        raw = _bytes(key)
        name = urlsafe_b64encode(raw).decode().rstrip("=") or "-"
        if len(name) > _NAME_CHARS_MAX:
            name = hashlib.sha256(raw).hexdigest()
        return f"{self.prefix}/{name}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
