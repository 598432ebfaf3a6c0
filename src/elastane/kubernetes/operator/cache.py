"""The last known objects of one kind, and this process's own writes to them.

Owns the objects, by namespace and name, and the indexes over them. Knows no wire and no time, and
cannot fail. Three sources write into it: a list, the watch after it, and the answers to our own
writes. The last are what Kubernetes' controllers call expectations: a created pod or a written
status is there immediately, before the watch reports it. So no decision rests on less than this
process already did.

Of two views of an object the one with the higher version stays. Versions of one kind grow; the API
promises since Kubernetes 1.35 that they may be compared, and all servers before it kept to that. A
deleted object does not come back by a late answer: its uid is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Generic, Protocol, TypeVar

from elastane.kubernetes.model import Meta
from elastane.kubernetes.operator.bounds import GONE_REMEMBERED_MAX


class HasMeta(Protocol):
    """Any object of the API."""

    @property
    def metadata(self) -> Meta:
        """Its name, uid and version."""
        ...


T = TypeVar("T", bound=HasMeta)


def key_of(meta: Meta) -> str:
    """Return `namespace/name`; of what has no namespace `/name`."""
    return f"{meta.namespace}/{meta.name}"


class Index(Generic[T]):
    """The objects of a cache by a key that is derived of each; "" keeps one out."""

    def __init__(self, derive: Callable[[T], str]) -> None:
        self.derive = derive
        self._groups: dict[str, dict[str, T]] = {}

    def __getitem__(self, key: str) -> tuple[T, ...]:
        return tuple(self._groups.get(key, {}).values())

    def keys(self) -> Iterable[str]:
        """Return the keys that something is under."""
        return self._groups.keys()

    def add(self, name: str, one: T) -> None:
        """Take an object in, in the place of what was there by its name and key."""
        key = self.derive(one)
        if key:
            self._groups.setdefault(key, {})[name] = one

    def remove(self, name: str, one: T) -> None:
        """Take an object out that is in."""
        key = self.derive(one)
        if key:
            group = self._groups[key]
            del group[name]
            if not group:
                del self._groups[key]


class Cache(Generic[T]):
    """All objects of one kind that were asked for; `changed(before, after)` is told each change.

    `deleted(last)` is called with the state of each object at its deletion, as the watch tells it.
    """

    def __init__(
        self,
        changed: Callable[[T | None, T | None], None],
        deleted: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._changed = changed
        self._deleted = deleted
        self._objects: dict[str, T] = {}
        self._indexes: list[Index[T]] = []
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.synced = False

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[T]:
        return iter(self._objects.values())

    def get(self, key: str) -> T | None:
        """Return the object of `namespace/name`."""
        return self._objects.get(key)

    def index(self, derive: Callable[[T], str]) -> Index[T]:
        """Return an index of this cache, which is to be empty still."""
        assert not self._objects, "an index that would lack what is there"
        made = Index(derive)
        self._indexes.append(made)
        return made

    def saw(self, one: T) -> None:
        """Take in what the watch told."""
        before = self._objects.get(key_of(one.metadata))
        if before is not None and (_is_newer(before, one) or _is_same(before, one)):
            return  # we wrote it
        if one.metadata.uid not in self._gone:
            self._put(before, one)

    def saw_gone(self, one: T) -> None:
        """Take in that the watch told of a deletion."""
        self._deleted(one)
        self._remember_gone(one.metadata.uid)
        before = self._objects.get(key_of(one.metadata))
        if before is not None and before.metadata.uid == one.metadata.uid:
            self._put(before, None)

    def wrote(self, one: T) -> None:
        """Take in what the server answered to a write of ours."""
        before = self._objects.get(key_of(one.metadata))
        late = before is not None and (_is_newer(before, one) or _is_same(before, one))
        if not late and one.metadata.uid not in self._gone:
            self._put(before, one)

    def lacks(self, key: str, uid: str) -> None:
        """Take in that the server does not have the object that we meant to write to."""
        self._remember_gone(uid)
        before = self._objects.get(key)
        if before is not None and before.metadata.uid == uid:
            self._put(before, None)

    def retain(self, uids: Set[str], version: str) -> None:
        """Take in that a whole list, as of `version`, was of these; what we wrote since stays."""
        as_of = _number(version)
        for before in list(self._objects.values()):
            meta = before.metadata
            if meta.uid not in uids and not 0 < as_of < _number(meta.resource_version):
                self._remember_gone(meta.uid)
                self._put(before, None)
        self.synced = True

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
    """Whether `one` is of a later version than `other`; no where versions are no numbers."""
    return _number(one.metadata.resource_version) > _number(other.metadata.resource_version)


def _is_same(one: HasMeta, other: HasMeta) -> bool:
    mine, others = one.metadata, other.metadata
    return mine.uid == others.uid and mine.resource_version == others.resource_version
