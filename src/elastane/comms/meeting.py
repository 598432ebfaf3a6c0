"""The store as one group's construction sees it: it notes the addresses, and can be ended.

gloo asks a store for its peers' addresses while it is being built. This one passes everything on
to the store that it was given, keeps what it saw, and refuses to go on once the world was ended.
Fails as the store beneath does, and with ConfigurationError where an address cannot be read: gloo
itself would crash on it, or could not be brought out of a collective later.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from elastane.comms.sockets import SocketEntry, parse_entry
from elastane.errors import ConfigurationError

_PREFIX = "gloo/"


class Meeting(Store):
    """One construction's view of `inner`."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.own: SocketEntry | None = None
        self.peers: list[SocketEntry] = []
        self.ended = False

    def set(self, key: str, value: bytes | str) -> None:
        """Publish; what this rank publishes tells where it listens."""
        self._go_on()
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.own = _entry(raw)
        self._inner.set(_PREFIX + key, raw)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key, and note the address in it."""
        self.wait([key])
        raw = bytes(self._inner.get(_PREFIX + key))
        self.peers.append(_entry(raw))
        return raw

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait for keys."""
        self._go_on()
        names = [_PREFIX + key for key in keys]
        if limit is None:
            self._inner.wait(names)
        else:
            self._inner.wait(names, limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._go_on()
        return self._inner.check([_PREFIX + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Count."""
        self._go_on()
        return self._inner.add(_PREFIX + key, amount)

    def delete_key(self, key: str) -> bool:
        """Forget a key."""
        return self._inner.delete_key(_PREFIX + key)

    def set_timeout(self, limit: timedelta) -> None:
        """Bound later waits."""
        self._inner.set_timeout(limit)

    def _go_on(self) -> None:
        if self.ended:
            raise RuntimeError("the world was ended while its process group was being built")


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
