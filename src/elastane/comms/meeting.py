"""The store that gloo sees during one construction: it records addresses, and can be aborted.

gloo asks a store for its peers' addresses while it is being built. This one forwards all calls to
the given store, records the addresses, and refuses further calls once the world was aborted. Fails
as the inner store does. An address that cannot be read raises ConfigurationError: gloo would crash
on it, or its collectives could not be aborted later.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from elastane.comms.sockets import SocketEntry, parse_entry
from elastane.errors import ConfigurationError

_PREFIX = "gloo/"


class Meeting(Store):
    """One construction's view of the store `inner`."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.own: SocketEntry | None = None
        self.peers: list[SocketEntry] = []
        self.aborted = False

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a key; this rank's own value contains the address where it listens."""
        self._refuse_if_aborted()
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.own = _entry(raw)
        self._inner.set(_PREFIX + key, raw)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key, and record the address in it."""
        self.wait([key])
        raw = bytes(self._inner.get(_PREFIX + key))
        self.peers.append(_entry(raw))
        return raw

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait for keys."""
        self._refuse_if_aborted()
        names = [_PREFIX + key for key in keys]
        if limit is None:
            self._inner.wait(names)
        else:
            self._inner.wait(names, limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._refuse_if_aborted()
        return self._inner.check([_PREFIX + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._refuse_if_aborted()
        return self._inner.add(_PREFIX + key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._inner.delete_key(_PREFIX + key)

    def set_timeout(self, limit: timedelta) -> None:
        """Bound later waits."""
        self._inner.set_timeout(limit)

    def _refuse_if_aborted(self) -> None:
        if self.aborted:
            raise RuntimeError("the world was aborted while its process group was being built")


def _entry(raw: bytes) -> SocketEntry:
    entry = parse_entry(raw)
    if entry is None:
        raise ConfigurationError(
            f"torch {torch.__version__}: the address that gloo published cannot be read"
            f" ({len(raw)} bytes)",
            slug="group-layout",
            expected="a PyTorch that this version of elastane knows, the same on all nodes",
            next_step="install torch 2.13, or a newer elastane",
        )
    return entry
