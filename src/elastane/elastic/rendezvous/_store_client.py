"""Blocking calls to a store, for parts of the API that receive a client of etcd.

Owns an event loop in a daemon thread, which the first call starts. A forked child gets a new one.
How it fails: as the store does, with StoreError or ConflictError; it never raises TimeoutError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from elastane.stores import ConflictError, Entry, Store, make_store

T = TypeVar("T")


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
