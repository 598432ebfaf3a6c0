"""etcd v3's messages as its JSON gateway writes them, typed and bounded, and their session.

Bytes are base64, 64-bit integers are strings, and false, zero and empty values are left out. So
every field has a default, and numbers are decoded leniently. `GatewaySession` adds what each
request needs: the path of the server's version, and the token of the login. It fails as `gateway`
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from elastane.errors import ConfigurationError, StoreError
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.etcd.gateway import EtcdAnswer, Gateway, trouble_of

T = TypeVar("T")
_TOKEN_IS_OLD = ("invalid auth token", "auth: token", "revision of auth store is old")


class Header(msgspec.Struct):
    """The revision of the whole store as of an answer."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """A key as it is stored. `version` counts its writes since it was created."""

    key: bytes = b""
    value: bytes = b""
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


class WatchedKey(msgspec.Struct):
    """One message of a watch. The content of its events is not used: the key is read again."""

    canceled: bool = False
    events: list[dict[str, Any]] = []


class WatchLine(msgspec.Struct):
    """One line of a watch."""

    result: WatchedKey = msgspec.field(default_factory=WatchedKey)


# Made once: msgspec lays a type out when it first decodes it, and crashes if two threads do so at
# once (0.22).
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind, strict=False)
    for kind in (Header, KeyRange, Put, Txn, LeaseGrant, KeepAlive, Token, WatchLine)
}


def decode(content: bytes, kind: type[T]) -> T:
    """Return the message; one of UNREADABLE for anything else."""
    message: T = _DECODERS[kind].decode(content)
    return message


def is_(key: bytes, target: str, number: int) -> dict[str, Any]:
    """Return the condition of a transaction that the key's `target` is `number`.

    `target`: mod or create, which are revisions, or version.
    """
    field = {"mod": "mod_revision", "create": "create_revision", "version": "version"}[target]
    return {"key": key, "target": target.upper(), "result": "EQUAL", field: str(number)}


def txn(
    guards: list[dict[str, Any]], then: list[dict[str, Any]], otherwise: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a transaction: `then` is done if all `guards` hold, `otherwise` if not."""
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


class GatewaySession:
    """v3's JSON over a gateway: the paths of the server's version, and the login's token."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.settings = gateway.settings
        self._root = ""
        self._token = ""

    async def call(
        self, path: str, request: Mapping[str, Any], kind: type[T], *, write: bool = False
    ) -> T:
        """Return the typed answer; StoreError for no answer or a refusal."""
        for last in (False, True):
            await self._begin()
            answer = await self.gateway.ask(
                "POST",
                self._root + path,
                write=write,
                content=msgspec.json.encode(request),
                headers=self.headers,
            )
            if answer.status == 200:
                return self._decode(answer, kind)
            text = trouble_of(answer.content)
            if last or not any(sign in text for sign in _TOKEN_IS_OLD):
                raise self.gateway.refused(answer, text)
            self._token = ""
        raise AssertionError("the last turn returns or raises")

    @property
    def headers(self) -> dict[str, str]:
        """The headers that identify this user to the server."""
        return {"Authorization": self._token} if self._token else {}

    @property
    def root(self) -> str:
        """The beginning of every path, once a call was made."""
        return self._root

    async def _begin(self) -> None:
        if not self._root:
            self._root = await self._find_root()
        if self.settings.user and not self._token:
            name = {"name": self.settings.user, "password": self.settings.password}
            answer = await self.gateway.ask(
                "POST", f"{self._root}/auth/authenticate", content=msgspec.json.encode(name)
            )
            if answer.status != 200:
                raise self.gateway.refused(answer, trouble_of(answer.content))
            self._token = self._decode(answer, Token).token

    async def _find_root(self) -> str:
        """Return the root of the server's gateway: /v3 since etcd 3.4, /v3beta in 3.3."""
        for root in ("/v3", "/v3beta"):
            answer = await self.gateway.ask("POST", f"{root}/kv/range", content=b'{"key":"AA=="}')
            if answer.status != 404:
                return root
        raise ConfigurationError(
            f"the server at {self.gateway.settings.names} has no JSON gateway of etcd v3",
            slug="etcd-version",
            expected="etcd 3.3 or later, with --enable-grpc-gateway (its default)",
            next_step="--rdzv-backend etcd-v2, where the server speaks v2",
        )

    def _decode(self, answer: EtcdAnswer, kind: type[T]) -> T:
        try:
            return decode(answer.content, kind)
        except UNREADABLE as error:
            raise StoreError(
                f"etcd: the answer of {answer.url} is no message of etcd: {error}",
                slug="store-refused",
                expected="an etcd server at --rdzv-endpoint",
                next_step=f"curl {answer.url}",
            ) from error
