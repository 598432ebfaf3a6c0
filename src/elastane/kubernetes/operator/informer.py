"""The last known objects of one kind: a cache, and the informer that keeps it up to date.

The cache owns the objects, by namespace and name, and the indexes over them. It knows no wire and
no time, and cannot fail. Three sources write into it: a list, the watch after it, and the answers
to the operator's own writes. With the answers, the cache has a created pod or a written status
before the watch reports it. So each decision sees all that this process has done. (Kubernetes'
controllers call that expectations.)

Of two versions of an object the higher one stays. Versions of one kind grow. The API promises since
Kubernetes 1.35 that versions may be compared, and earlier servers behave the same. A late answer
does not bring a deleted object back, since its uid is remembered.

The informer owns the loop of list and watch, and its backoff. It never ends by a failure. A broken
connection is logged once and retried with backoff, and the watch resumes from the last version
seen. A version that the server has dropped leads to a new list. A missing right is logged by name.
The API of an optional kind may be missing: then the cache says so, until it is installed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from elastane.kubernetes.client import (
    Api,
    ApiError,
    ApiForbiddenError,
    ApiGoneError,
    ApiNotFoundError,
    ApiUnreachableError,
    Resource,
    Selector,
)
from elastane.kubernetes.client.resource import EVERYTHING
from elastane.kubernetes.model import Meta
from elastane.kubernetes.operator.bounds import GONE_REMEMBERED_MAX, RELIST_FIRST_S, RELIST_MAX_S


class HasMeta(Protocol):
    """Any object of the API."""

    @property
    def metadata(self) -> Meta:
        """Its name, uid and version."""
        ...


T = TypeVar("T", bound=HasMeta)


def key_of(meta: Meta) -> str:
    """Return `namespace/name`; `/name` for an object without a namespace."""
    return f"{meta.namespace}/{meta.name}"


class Index(Generic[T]):
    """The objects of a cache by a key that is derived from each; an object with "" is left out."""

    def __init__(self, derive: Callable[[T], str]) -> None:
        self.derive = derive
        self._groups: dict[str, dict[str, T]] = {}

    def __getitem__(self, key: str) -> tuple[T, ...]:
        return tuple(self._groups.get(key, {}).values())

    def add(self, name: str, one: T) -> None:
        """Add an object; it replaces the one with the same name and key."""
        key = self.derive(one)
        if key:
            self._groups.setdefault(key, {})[name] = one

    def remove(self, name: str, one: T) -> None:
        """Remove an object that is in the index."""
        key = self.derive(one)
        if key:
            group = self._groups[key]
            del group[name]
            if not group:
                del self._groups[key]


class Cache(Generic[T]):
    """All selected objects of one kind; `changed(before, after)` is called at each change.

    `deleted(last)` is called with the last state of each deleted object, as the watch reports it,
    and `serving_changed()` when the kind can be read again, or cannot any more.
    """

    def __init__(
        self,
        changed: Callable[[T | None, T | None], None],
        deleted: Callable[[T], None] = lambda _: None,
        serving_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = changed
        self._deleted = deleted
        self._serving_changed = serving_changed
        self._objects: dict[str, T] = {}
        self._indexes: list[Index[T]] = []
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.synced = False
        # Why the kind cannot be read, for a person; empty while it can.
        self.unserved = ""

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[T]:
        return iter(self._objects.values())

    def get(self, key: str) -> T | None:
        """Return the object of `namespace/name`."""
        return self._objects.get(key)

    def index(self, derive: Callable[[T], str]) -> Index[T]:
        """Add an index to this cache, which must still be empty."""
        assert not self._objects, "an index that would lack what is there"
        made = Index(derive)
        self._indexes.append(made)
        return made

    def saw(self, one: T) -> None:
        """Store the object of a watch event."""
        before = self._objects.get(key_of(one.metadata))
        if before is not None and (_is_newer(before, one) or _is_same(before, one)):
            return  # this process's own write, already in the cache
        if one.metadata.uid not in self._gone:
            self._put(before, one)

    def saw_gone(self, one: T) -> None:
        """Remove the object of a deletion that the watch reported."""
        self._deleted(one)
        self._remember_gone(one.metadata.uid)
        before = self._objects.get(key_of(one.metadata))
        if before is not None and before.metadata.uid == one.metadata.uid:
            self._put(before, None)

    def wrote(self, one: T) -> None:
        """Store the server's answer to a write of this process."""
        before = self._objects.get(key_of(one.metadata))
        late = before is not None and (_is_newer(before, one) or _is_same(before, one))
        if not late and one.metadata.uid not in self._gone:
            self._put(before, one)

    def lacks(self, key: str, uid: str) -> None:
        """Remove an object, because a write to it was answered with 404."""
        self._remember_gone(uid)
        before = self._objects.get(key)
        if before is not None and before.metadata.uid == uid:
            self._put(before, None)

    def retain(self, uids: Set[str], version: str) -> None:
        """Replace the content by a list of this version; later writes of this process stay."""
        as_of = _number(version)
        for before in list(self._objects.values()):
            meta = before.metadata
            if meta.uid not in uids and not 0 < as_of < _number(meta.resource_version):
                self._remember_gone(meta.uid)
                self._put(before, None)
        was_unserved = bool(self.unserved)
        self.synced, self.unserved = True, ""
        if was_unserved:
            self._serving_changed()

    def withdraw(self, why: str) -> None:
        """Drop all objects: the cluster does not serve their API now."""
        for before in list(self._objects.values()):
            self._put(before, None)
        was_served = not self.unserved
        self.synced, self.unserved = False, why
        if was_served:
            self._serving_changed()

    def _put(self, before: T | None, after: T | None) -> None:
        some = after if after is not None else before
        assert some is not None
        key = key_of(some.metadata)
        if before is not None:
            for index in self._indexes:
                index.remove(key, before)
        if after is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = after
            for index in self._indexes:
                index.add(key, after)
        self._changed(before, after)

    def _remember_gone(self, uid: str) -> None:
        self._gone[uid] = None
        if len(self._gone) > GONE_REMEMBERED_MAX:
            self._gone.popitem(last=False)


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0


def _is_newer(one: HasMeta, other: HasMeta) -> bool:
    """Whether `one` has a later version than `other`; False if versions are not numbers."""
    return _number(one.metadata.resource_version) > _number(other.metadata.resource_version)


def _is_same(one: HasMeta, other: HasMeta) -> bool:
    mine, others = one.metadata, other.metadata
    return mine.uid == others.uid and mine.resource_version == others.resource_version


_log = logging.getLogger(__name__)


class WatchConnection:
    """The state of the connection to the API server, over all informers: lost, or back."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def lost(self, kind: str, error: ApiError) -> None:
        """Log the loss, once for all kinds."""
        if not self._lost:
            _log.warning("%s: tried again until it answers", error.what)
        self._lost.add(kind)

    def back(self, kind: str) -> None:
        """Log the return once all kinds are back."""
        if kind in self._lost:
            self._lost.remove(kind)
            if not self._lost:
                _log.warning("kubernetes: the API server answers again")


@dataclass(frozen=True)
class Watched(Generic[T]):
    """The objects that an informer reads: those of one kind in a namespace, "" for all.

    `optional`: the operator can work without this kind, so a missing right or API is no fault.
    """

    resource: Resource
    namespace: str
    kind: type[T]
    selector: Selector = EVERYTHING
    optional: bool = False


class Informer(Generic[T]):
    """Fills `cache` with the watched objects.

    `connection` is shared by all informers of an operator. `count` gets the name of a metric at
    each repeated list and each failure.
    """

    def __init__(
        self,
        api: Api,
        watched: Watched[T],
        cache: Cache[T],
        connection: WatchConnection,
        count: Callable[[str], None],
    ) -> None:
        self._api = api
        self._namespace = watched.namespace if watched.resource.namespaced else ""
        self._kind = watched.kind
        self._selector = watched.selector
        self._cache = cache
        self._connection = connection
        self._count = count
        self._version = ""
        self._failures = 0
        self.resource = watched.resource
        self.optional = watched.optional
        # Why the informer cannot read, for a person; empty while it can.
        self.fault = ""
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiGoneError:
                self._version = ""
                self._count("elastane_relists_total")
            except ApiError as error:
                self._handle(error)
            pause_s = min(RELIST_MAX_S, RELIST_FIRST_S * 2 ** min(self._failures, 10))
            self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _list(self) -> None:
        uids: set[str] = set()
        version = ""
        pages = self._api.pages(self.resource, self._namespace, self._kind, self._selector)
        # The list is read in pages, so that a repeated list does not need twice the memory.
        async for page in pages:
            for one in page.items:
                uids.add(one.metadata.uid)
                self._cache.saw(one)
            version = page.version
        self._cache.retain(uids, version)
        self._version = version
        self._succeeded()
        self.ready.set()

    async def _watch(self) -> None:
        events = self._api.watch(
            self.resource, self._namespace, self._kind, self._version, self._selector
        )
        try:
            async for seen in events:
                self._succeeded()
                if seen.object is not None and seen.change == "DELETED":
                    self._cache.saw_gone(seen.object)
                elif seen.object is not None:
                    self._cache.saw(seen.object)
                # The version is kept after the cache has the event: otherwise the server sends it
                # again.
                self._version = seen.version or self._version
        finally:
            await events.aclose()

    def _handle(self, error: ApiError) -> None:
        is_missing = isinstance(error, ApiNotFoundError)
        is_tolerated = self.optional and (is_missing or isinstance(error, ApiForbiddenError))
        if not is_tolerated:
            self._count("elastane_watch_errors_total")
        if isinstance(error, ApiUnreachableError):
            # Load balancers cut watches: a connection that comes back immediately is not logged.
            if self._failures:
                self._connection.lost(self.resource.kind, error)
        elif error.what != self.fault:
            level = logging.INFO if is_tolerated else logging.WARNING
            # Most clusters serve few of the optional kinds.
            _log.log(logging.DEBUG if is_tolerated and is_missing else level, "%s", error)
        self.fault = error.what
        if is_tolerated:
            if is_missing or not self._cache.synced:
                self._version = ""
                self._cache.withdraw(error.what)
            self.ready.set()

    def _succeeded(self) -> None:
        self._failures = 0
        self._connection.back(self.resource.kind)
        if self.fault:
            _log.info("%s: seen again", self.resource.label(self._namespace))
            self.fault = ""
