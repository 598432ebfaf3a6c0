"""The backends that keep a job in a store: what each one is, and how another package adds one.

Owns `StoreBackend`, the one object per backend that answers every question about it, and the entry
point group `elastane.stores`, whose entries name such objects. The stores that come with elastane
are entries of the same form; they stand in a table here, so that a source tree without installed
metadata has them. Nothing is imported before its name is asked for.

How it fails: ConfigurationError for an unknown name, and for an entry that cannot be loaded or is
no `StoreBackend`; the error names the package that brought it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from elastane.errors import ConfigurationError, ElastaneError
from elastane.protocol.limits import Timing
from elastane.stores.protocol import Store

GROUP = "elastane.stores"
# Names of --rdzv-backend that mean no store: the coordinator is then at the endpoint itself.
RESERVED = frozenset({"", "elastane", "c10d", "static", "standalone"})
_TIMING = Timing()
_BUILTIN = (
    EntryPoint("etcd", "elastane.stores.etcd:ETCD", GROUP),
    EntryPoint("etcd-v2", "elastane.stores.etcd:ETCD_V2", GROUP),
    EntryPoint("file", "elastane.stores.file:BACKEND", GROUP),
    EntryPoint("kubernetes", "elastane.kubernetes.store.backend:BACKEND", GROUP),
    EntryPoint("redis", "elastane.stores.redis:BACKEND", GROUP),
)


@dataclass(frozen=True)
class ConfKey:
    """One key of `--rdzv-conf` that a backend reads.

    `default` is what counts where the key is not given, "-" for nothing. A key whose name ends in
    `token`, `password`, `passwd` or `secret` is never shown, and is taken out of what workers get.
    """

    name: str
    meaning: str
    default: str = "-"
    unit: str = "text"


@dataclass(frozen=True)
class StorePlace:
    """The place of a store: `--rdzv-endpoint`, and the backend's keys of `--rdzv-conf`."""

    endpoint: str
    conf: Mapping[str, str]


def _as_it_is(place: StorePlace, environ: Mapping[str, str]) -> StorePlace:
    """Return the place unchanged: the store has no settings to check."""
    return place


@dataclass(frozen=True, kw_only=True)
class StoreBackend:
    """Everything that the rest of elastane asks about one backend.

    Args:
        name: what `--rdzv-backend` is given.
        make: returns the store at a place; it opens no connection and reads no file.
        endpoint: what `--rdzv-endpoint` names, in words, for messages.
        example: an endpoint as one writes it, for the next step of a message.
        needs_endpoint: whether `--rdzv-endpoint` must be given.
        check: called once, before anything starts, with the environment of the launcher. Returns
            the place that all later calls get, or raises ConfigurationError. May read small files.
            A backend that needs no endpoint returns one here.
        keys: the keys of `--rdzv-conf` that it reads.
        default_port: of an endpoint that names none; None where there are no ports.
        tls: whether the connection to the store can be encrypted.
        login: whether the store can ask for credentials.
        timing: the defaults of the durations; a store that bears few writes has longer leases.
        brings_server: whether `--standalone` starts a server for it (etcd alone).
        forgets: whether the store removes an entry once its ttl has passed.
        late_s: seconds for which others may still be refused a lease after its end.
    """

    name: str
    make: Callable[[StorePlace], Store]
    endpoint: str
    example: str
    needs_endpoint: bool = True
    check: Callable[[StorePlace, Mapping[str, str]], StorePlace] = _as_it_is
    keys: tuple[ConfKey, ...] = ()
    default_port: int | None = None
    tls: bool = False
    login: bool = False
    timing: Timing = _TIMING
    brings_server: bool = False
    forgets: bool = True
    late_s: float = 0.3

    def place(
        self, endpoint: str, conf: Mapping[str, str], environ: Mapping[str, str]
    ) -> StorePlace:
        """Return the checked place; ConfigurationError where none can be meant."""
        if self.needs_endpoint and not endpoint:
            raise self.without_endpoint()
        found = self.check(StorePlace(endpoint, dict(conf)), environ)
        if not found.endpoint:
            raise self.without_endpoint()
        return found

    def without_endpoint(self) -> ConfigurationError:
        """Return the error for a missing `--rdzv-endpoint`."""
        alone = "; one machine alone needs none: --standalone" if self.brings_server else ""
        return ConfigurationError(
            f"--rdzv-backend {self.name} without --rdzv-endpoint",
            slug="endpoint-missing",
            expected=self.endpoint,
            next_step=f"--rdzv-backend {self.name} --rdzv-endpoint {self.example}{alone}",
        )


def names() -> list[str]:
    """Return the names of all backends with a store, those of other packages included."""
    return sorted({entry.name for entry in (*_BUILTIN, *_installed())})


def is_store(name: str) -> bool:
    """Return whether a backend of this name has a store. Loads nothing."""
    return name not in RESERVED and bool(_entries(name))


def backend(name: str) -> StoreBackend:
    """Return the backend; ConfigurationError where there is none, or its entry is broken."""
    found = _entries(name)
    if not found:
        near = difflib.get_close_matches(name, names(), n=1)
        raise ConfigurationError(
            f"no store is named {name!r}",
            slug="store-backend",
            expected=(f"did you mean {near[0]}? " if near else "") + "one of " + ", ".join(names()),
            next_step=f"a package that brings it has an entry point {name!r} in the group {GROUP}",
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"--rdzv-backend {name} is brought by several packages: "
            + ", ".join(_package(entry) for entry in found),
            slug="store-backend",
            where=f"entry points {', '.join(entry.value for entry in found)} of group {GROUP}",
            next_step="pip uninstall all of them but one",
        )
    return _load(found[0])


def backends_of_key(key: str) -> list[str]:
    """Return the names of the backends that read this key of `--rdzv-conf`.

    Other packages are asked only where no store of elastane's own reads it. One that cannot be
    loaded is passed over: it fails when its name is asked for.
    """
    for entries in (_BUILTIN, _installed()):
        found = [one.name for one in _loadable(entries) if key in _key_names(one)]
        if found:
            return sorted(found)
    return []


def known_keys() -> list[str]:
    """Return all keys of `--rdzv-conf` that some backend reads."""
    every = _loadable((*_BUILTIN, *_installed()))
    return sorted({key for one in every for key in _key_names(one)})


def make_store(name: str, endpoint: str, conf: Mapping[str, str]) -> Store:
    """Return the store of the backend `name` at a place that was checked. Does no I/O."""
    return backend(name).make(StorePlace(endpoint, dict(conf)))


def _key_names(found: StoreBackend) -> set[str]:
    return {key.name for key in found.keys}


@functools.cache
def _installed() -> tuple[EntryPoint, ...]:
    """Return the entries of other packages, those that elastane's own names shadow left out."""
    own = {entry.name for entry in _BUILTIN}
    return tuple(entry for entry in entry_points(group=GROUP) if entry.name not in own)


def _entries(name: str) -> list[EntryPoint]:
    own = [entry for entry in _BUILTIN if entry.name == name]
    return own or [entry for entry in _installed() if entry.name == name]


def _loadable(entries: Iterable[EntryPoint]) -> list[StoreBackend]:
    found = []
    for entry in entries:
        try:
            found.append(_load(entry))
        except ElastaneError:
            continue
    return found


@functools.cache
def _load(entry: EntryPoint) -> StoreBackend:
    try:
        found = entry.load()
    except Exception as error:
        raise _broken(entry, f"it cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, StoreBackend):
        raise _broken(entry, f"it is {type(found).__name__}, not a StoreBackend")
    if found.name != entry.name or found.name in RESERVED:
        raise _broken(entry, f"its backend is named {found.name!r}")
    return found


def _broken(entry: EntryPoint, fault: str) -> ConfigurationError:
    return ConfigurationError(
        f"--rdzv-backend {entry.name} of the package {_package(entry)}: {fault}",
        slug="store-backend",
        where=f"entry point {entry.value} of group {GROUP}",
        expected=f"an elastane.stores.StoreBackend named {entry.name!r}",
        next_step=f"python -c 'import {entry.module}'",
    )


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "elastane"
