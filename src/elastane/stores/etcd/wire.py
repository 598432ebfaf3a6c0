"""etcd v3's messages as its JSON gateway writes them, typed and bounded.

Bytes are base64, 64-bit integers are strings, and false, zero and empty values are left out. So
every field has a default, and numbers are decoded leniently. Knows no connection.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from elastane.protocol.unreadable import UNREADABLE

T = TypeVar("T")


class Header(msgspec.Struct):
    """The revision of the whole store as of an answer."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """A key as it is stored. `version` counts its writes since it was created."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


class KeyRange(msgspec.Struct):
    """The answer to a read."""

    header: Header = msgspec.field(default_factory=Header)
    kvs: list[KeyValue] = []

    @property
    def first(self) -> KeyValue | None:
        """The requested key, None for an absent one."""
        return self.kvs[0] if self.kvs else None


class Put(msgspec.Struct):
    """The answer to a write, with the previous entry where it was requested."""

    prev_kv: KeyValue | None = None


class Response(msgspec.Struct):
    """One operation's answer within a transaction."""

    response_range: KeyRange = msgspec.field(default_factory=KeyRange)
    response_put: Put = msgspec.field(default_factory=Put)


class Txn(msgspec.Struct):
    """The answer to a transaction."""

    header: Header = msgspec.field(default_factory=Header)
    succeeded: bool = False
    responses: list[Response] = []


class LeaseGrant(msgspec.Struct):
    """The answer to a grant; TTL is in seconds, and may be longer than requested."""

    ID: int = 0
    TTL: int = 0


class KeepAlive(msgspec.Struct):
    """The answer to a renewal, one line; a TTL of 0 means that the lease has ended."""

    result: LeaseGrant = msgspec.field(default_factory=LeaseGrant)


class Token(msgspec.Struct):
    """The answer to user and password."""

    token: str = ""


class WatchEvent(msgspec.Struct):
    """A change of a key; `type` is left out for a write."""

    kv: KeyValue = msgspec.field(default_factory=KeyValue)
    type: str = "PUT"


class WatchedKey(msgspec.Struct):
    """One message of a watch."""

    header: Header = msgspec.field(default_factory=Header)
    canceled: bool = False
    events: list[WatchEvent] = []


class WatchLine(msgspec.Struct):
    """One line of a watch."""

    result: WatchedKey = msgspec.field(default_factory=WatchedKey)


class GatewayError(msgspec.Struct):
    """An error of the gateway."""

    error: str = ""
    message: str = ""
    code: int = 0


def decode(content: bytes, kind: type[T]) -> T:
    """Return the message; one of UNREADABLE for anything else."""
    return msgspec.json.decode(content, type=kind, strict=False)


def trouble_of(content: bytes) -> str:
    """Return the text of an error's body, or its beginning where it is no message."""
    try:
        found = decode(content, GatewayError)
    except UNREADABLE:
        return content[:200].decode(errors="replace").strip()
    return found.error or found.message


def is_(key: bytes, target: str, number: int) -> dict[str, Any]:
    """Return the guard that the key's `target` (mod, create or version) is `number`."""
    field = {"mod": "mod_revision", "create": "create_revision", "version": "version"}[target]
    return {"key": key, "target": target.upper(), "result": "EQUAL", field: str(number)}


def txn(
    guards: list[dict[str, Any]], then: list[dict[str, Any]], otherwise: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a transaction."""
    return {"compare": guards, "success": then, "failure": otherwise}


def put(key: bytes, value: bytes, lease: int = 0, *, prev_kv: bool = False) -> dict[str, Any]:
    """Return a write, as an operation of a transaction."""
    request = {"key": key, "value": value, "lease": str(lease), "prev_kv": prev_kv}
    return {"request_put": request}


def read(key: bytes) -> dict[str, Any]:
    """Return a read, as an operation of a transaction."""
    return {"request_range": {"key": key}}


def remove(key: bytes, end: bytes = b"") -> dict[str, Any]:
    """Return the deletion of a key, or of all from `key` until before `end`."""
    request = {"key": key, "range_end": end} if end else {"key": key}
    return {"request_delete_range": request}
