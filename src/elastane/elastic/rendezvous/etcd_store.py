"""A torch store in etcd (or in any store of elastane), for agents that share nothing else.

Each key of torch's, which may be any text, becomes one name below a prefix. Waiting uses a watch.
How it fails: LookupError if a key did not come in time, StoreError if etcd is unreachable.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from elastane.elastic.rendezvous._store_client import StoreClient
from elastane.stores import ConflictError, Entry

# A name has at most 200 characters; a longer key is replaced by its digest.
_NAME_CHARS_MAX = 180


class EtcdStore(Store):
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
