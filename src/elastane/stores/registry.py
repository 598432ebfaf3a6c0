"""From the name of a rendezvous backend to its store.

Owns the table of names. Some backends have no store: the coordinator is then found at the
endpoint itself. How it fails: ConfigurationError that lists the names that are valid.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.stores.protocol import Store

# Makes a store of what --rdzv-endpoint says and of the pairs of --rdzv-conf.
StoreFactory = Callable[[str, dict[str, str]], Store]

_WITHOUT_STORE = ("", "elastane", "c10d", "static")


def _file_store(endpoint: str, conf: dict[str, str]) -> Store:
    from elastane.stores.file import FileStore

    if not endpoint:
        raise ConfigurationError(
            "--rdzv-backend file: --rdzv-endpoint is empty",
            slug="store-endpoint",
            expected="the path of a folder that all nodes share",
            next_step="--rdzv-endpoint /shared/elastane",
        )
    return FileStore(Path(endpoint).expanduser().absolute())


def _etcd_store(endpoint: str, conf: dict[str, str]) -> Store:
    from elastane.stores.etcd.settings import read_settings
    from elastane.stores.etcd.v3 import EtcdStore

    return EtcdStore(read_settings(endpoint, conf))


def _etcd_v2_store(endpoint: str, conf: dict[str, str]) -> Store:
    from elastane.stores.etcd.settings import read_settings
    from elastane.stores.etcd.v2 import EtcdV2Store

    return EtcdV2Store(read_settings(endpoint, conf))


def _kubernetes_store(endpoint: str, conf: dict[str, str]) -> Store:
    # By name: Kubernetes is a room above this one.
    factory: StoreFactory = import_module("elastane.kubernetes.store.factory").make_store
    return factory(endpoint, conf)


_FACTORIES: dict[str, StoreFactory] = {
    "file": _file_store,
    "etcd": _etcd_store,
    "etcd-v2": _etcd_v2_store,
    "kubernetes": _kubernetes_store,
}


def register(backend: str, factory: StoreFactory) -> None:
    """Add a backend; entry points of other packages come in here."""
    if backend in _FACTORIES or backend in _WITHOUT_STORE:
        raise ConfigurationError(
            f"rendezvous backend {backend!r} exists already", slug="store-backend"
        )
    _FACTORIES[backend] = factory


def backends() -> list[str]:
    """Return the names that --rdzv-backend takes."""
    return sorted({*_FACTORIES, *_WITHOUT_STORE} - {""})


def make_store(backend: str, endpoint: str, conf: dict[str, str]) -> Store | None:
    """Return the backend's store, or None where the backend has none.

    Does no I/O. Raises ConfigurationError for a name that is not known.
    """
    if backend in _WITHOUT_STORE:
        return None
    factory = _FACTORIES.get(backend)
    if factory is not None:
        return factory(endpoint, conf)
    raise ConfigurationError(
        f"--rdzv-backend {backend!r} is unknown",
        slug="store-backend",
        expected="one of " + ", ".join(backends()),
        next_step="--rdzv-backend file --rdzv-endpoint <folder that all nodes share>",
    )
