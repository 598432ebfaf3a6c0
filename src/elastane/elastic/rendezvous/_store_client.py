"""Blocking calls on one of our stores, for the parts of the API that are handed a client of etcd.

Owns a loop in a daemon thread, which the first call starts. A forked child gets its own. How it
fails: as the store does, StoreError or ConflictError; TimeoutError is never raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from elastane.stores.protocol import ConflictError, Entry, Store
from elastane.stores.registry import make_store

T = TypeVar("T")


class StoreClient:
    """A store that is called from threads. `open_store` makes one for a loop, as often as asked."""

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
        """Return the key's entry as soon as there is one, None after `timeout_s`."""

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
        """Let go of the connection; the next call makes another."""
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
    """A client of one etcd: `endpoint` and `conf` as --rdzv-endpoint and --rdzv-conf have them."""

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

        Without a version it is removed whatever it holds, as python-etcd's client does.
        """
        del dir  # There are no folders: what is below a key goes with `recursive`.
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
        """Return what opens this etcd, with all keys below `prefix` where one is given."""
        conf = {**self.conf, "etcd_prefix": prefix} if prefix else self.conf
        return lambda: make_store(self.backend, self.endpoint, conf)
