"""Makes a client of a store from a specification, which can be passed to another process.

`file:FOLDER`, `register:FILE`, `etcd:ENDPOINT#PREFIX` (also etcd-v2 and redis),
`kubernetes:KUBECONFIG#NAMESPACE`, or `given:NAME=ENDPOINT#PREFIX` for a store of another package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from registers import FileRegister

from elastane.stores.file import FileStore
from elastane.stores.protocol import Store
from elastane.stores.register import RegisterStore
from elastane.stores.registry import make_store

# The key of --rdzv-conf that is set from a specification.
_KEYS = {
    "etcd": "etcd_prefix",
    "etcd-v2": "etcd_prefix",
    "redis": "redis_prefix",
    "kubernetes": "kubeconfig",
}


class PrefixedStore:
    """A shared store, in which every key of this client lies below a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._store, name)
        return lambda key, *values, **named: method(f"{self._prefix}/{key}", *values, **named)


def connect(specification: str) -> Store:
    kind, _, rest = specification.partition(":")
    if kind == "register":
        return RegisterStore(FileRegister(Path(rest)), rest, poll_s=0.02)
    if kind == "given":
        named, _, prefix = rest.rpartition("#")
        name, _, endpoint = named.partition("=")
        return PrefixedStore(make_store(name, endpoint, {}), prefix)
    if kind in _KEYS:
        endpoint, _, named = rest.rpartition("#")
        if kind == "kubernetes":
            endpoint, named = named, endpoint
        return make_store(kind, endpoint, {_KEYS[kind]: named})
    assert kind == "file", kind
    return FileStore(Path(rest), poll_s=0.02)
