"""From bytes of the wire to types: whatever is not what it should be is an ApiAnswerError.

Owns the shapes that every list and every object shares. Knows no kind.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from elastane.kubernetes.client.errors import garbage
from elastane.protocol.unreadable import UNREADABLE

T = TypeVar("T")


class ListMeta(msgspec.Struct):
    """Of a list: its version, and where the next page begins."""

    resourceVersion: str = ""  # noqa: N815 the wire's
    going_on: str = msgspec.field(default="", name="continue")


class Items(msgspec.Struct, Generic[T]):
    """A page of a list; an empty one may say null."""

    metadata: ListMeta
    items: list[T] | None = None


class VersionMeta(msgspec.Struct):
    """Of an object: its version."""

    resourceVersion: str = ""  # noqa: N815 the wire's


class Versioned(msgspec.Struct):
    """An object of which only the version is read."""

    metadata: VersionMeta


def decoded(content: bytes | msgspec.Raw, kind: type[T], told: str, where: str) -> T:
    """Return the object; ApiAnswerError for what is none of `kind`."""
    try:
        found: T = _decoder(kind).decode(content)
    except UNREADABLE as error:
        raise garbage(told, str(error)[:300], where=where) from error
    return found


def pages(content: bytes, kind: type[T], told: str, where: str) -> Items[T]:
    """Return the page of a list of `kind`; ApiAnswerError for what is none."""
    return decoded(content, Items[kind], told, where)  # type: ignore[valid-type]


@functools.lru_cache(maxsize=256)
def _cached(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return _cached(kind)
