"""The client: typed requests for objects, one method for each verb of the API, and watches.

Owns the requests, the types of their answers, and the stream of a watch's events. `transport` owns
connections, `resource` paths. A request is repeated only if the repetition cannot do it twice. The
module fails with one of `errors`, each of which names the request, and with ConfigurationError
without credentials.

A server ends each watch after a while, which is normal: the next one resumes from the last version
seen. A watch without any event or bookmark for a while longer than that counts as a broken
connection. A watch fails with ApiGoneError for a version that is too old (list again),
ApiUnreachableError for a broken connection (resume from the version of the last event), and
ApiAnswerError for a line that is not an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec

from elastane.kubernetes.client.credentials import ClusterAccess
from elastane.kubernetes.client.errors import (
    ApiError,
    ApiGoneError,
    ApiNotFoundError,
    Status,
    Versioned,
    decoded,
    garbage,
    pages,
    refusal,
)
from elastane.kubernetes.client.resource import EVERYTHING, Resource, Selector, one
from elastane.kubernetes.client.transport import PAGE_BYTES_MAX, ApiRequest, Transport

T = TypeVar("T")

# A server ends a watch after about this time, and sends a bookmark each minute until then.
WATCH_S = 60.0
# ... and a connection counts as dead after this much more time without data.
SILENCE_MARGIN_S = 5.0
# Pauses between two watches if a server ends each of them at once: the first and the longest.
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0
Change = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class SeenObject(msgspec.Struct, Generic[T], frozen=True):
    """One event of a watch. `object` is None for a BOOKMARK, which only says how far it is.

    Each watch begins with a bookmark of ours, once the server has answered.
    """

    change: Change
    object: T | None
    version: str


class _Line(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


async def follow(
    http: Transport, request: ApiRequest, kind: type[T], from_version: str, watch_s: float
) -> AsyncGenerator[SeenObject[T], None]:
    """Yield every event after `from_version`, over as many watches as are needed."""
    version, pause_s = from_version, PAUSE_S
    while True:
        # The timeout is random, so that the watches of all clients do not end at one moment.
        asked_s = max(1, round(watch_s * random.uniform(0.9, 1.0)))
        query = request.query | {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(asked_s),
        }
        began = msgspec.structs.replace(request, query=query, label="watch" + request.label[4:])
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with http.stream(began, silence_s=watch_s + SILENCE_MARGIN_S) as lines:
            yield SeenObject("BOOKMARK", None, version)
            async for line in lines:
                if line.strip():
                    seen = _seen(line, kind, began.label, http.access.where)
                    version = seen.version or version
                    yield seen
        lived = loop.time() - begun_s >= min(1.0, asked_s / 2)
        pause_s = PAUSE_S if lived else min(2 * pause_s, PAUSE_MAX_S)
        if not lived:
            await asyncio.sleep(pause_s)


def _seen(line: bytes, kind: type[T], label: str, where: str) -> SeenObject[T]:
    event = decoded(line, _Line, label, where)
    if event.type == "ERROR":
        status = decoded(event.object, Status, label, where)
        if not 400 <= status.code < 600:
            raise garbage(label, f"an error of code {status.code}", where=where)
        raise refusal(label, status.code, status, where=where)
    version = decoded(event.object, Versioned, label, where).metadata.resourceVersion
    if event.type == "BOOKMARK":
        return SeenObject(event.type, None, version)
    return SeenObject(event.type, decoded(event.object, kind, label, where), version)


PAGE_ITEMS = 500  # kubectl's
# One request and its answer. A page of 500 pods takes an API server a quarter of a second; one
# whose etcd elects a leader takes a few.
TIMEOUT_S = 15.0
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
# The server refuses fields that it does not know, instead of dropping them.
_STRICT = {"fieldValidation": "Strict"}


class ListPage(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list, or the whole; a watch from `version` on misses nothing after the list."""

    items: tuple[T, ...]
    version: str


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a deletion: the object's required uid and version, grace, and dependents."""

    uid: str = ""
    version: str = ""
    grace_s: int | None = None  # of a pod; 0: do not wait for its kubelet; None: as the pod says
    propagation: str = ""  # Background, Foreground or Orphan; "": the default of the kind

    def body(self) -> dict[str, Any]:
        """Return the DeleteOptions, all in the body: with a body the server ignores the query."""
        wanted = {"uid": self.uid, "resourceVersion": self.version}
        guards = {key: value for key, value in wanted.items() if value}
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if guards:
            body["preconditions"] = guards
        if self.grace_s is not None:
            body["gracePeriodSeconds"] = self.grace_s
        if self.propagation:
            body["propagationPolicy"] = self.propagation
        return body


class Api:
    """One API server, as one identity. Opens nothing before the first request.

    `kind` is the type that the answer is read as: a msgspec Struct of the fields that the caller
    reads, or dict[str, Any] for everything.
    """

    def __init__(
        self, access: ClusterAccess, *, timeout_s: float = TIMEOUT_S, connections_max: int = 32
    ) -> None:
        self.access = access
        self._http = Transport(access, timeout_s=timeout_s, connections_max=connections_max)

    async def get(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        kind: type[T],
        subresource: str = "",
    ) -> T:
        """Return the object, including every write that had ended before the call."""
        request = _request("GET", resource, namespace, name, subresource)
        return await self._typed(request, kind)

    async def find(self, resource: Resource, namespace: str, name: str, kind: type[T]) -> T | None:
        """Return the object, or None where it does not exist."""
        try:
            return await self.get(resource, namespace, name, kind)
        except ApiNotFoundError:
            return None

    async def pages(
        self,
        resource: Resource,
        namespace: str,
        kind: type[T],
        selector: Selector = EVERYTHING,
    ) -> AsyncGenerator[ListPage[T], None]:
        """Yield the list in pages of 500, all of one version; ApiGoneError if that got too old.

        The namespace "" means all namespaces. A page is read whole before it is yielded, so memory
        holds one page of bytes at a time.
        """
        going_on = ""
        while True:
            query = {"limit": str(PAGE_ITEMS), **selector.query()}
            if going_on:
                query["continue"] = going_on
            request = msgspec.structs.replace(
                _request("GET", resource, namespace), query=query, bytes_max=PAGE_BYTES_MAX
            )
            content = await self._http.ask(request)
            found = pages(content, kind, request.label, self.access.where)
            yield ListPage(tuple(found.items or ()), found.metadata.resourceVersion)
            going_on = found.metadata.going_on
            if not going_on:
                return

    async def list(
        self,
        resource: Resource,
        namespace: str,
        kind: type[T],
        selector: Selector = EVERYTHING,
    ) -> ListPage[T]:
        """Return the whole list."""
        items: list[T] = []
        version = ""
        async for page in self.pages(resource, namespace, kind, selector):
            items += page.items
            version = page.version
        return ListPage(tuple(items), version)

    async def create(
        self, resource: Resource, namespace: str, manifest: Mapping[str, Any], kind: type[T]
    ) -> T:
        """Create the object; ApiConflictError with `exists` if its name is taken.

        Servers of Kubernetes 1.25 and later refuse a field that they do not know
        (ApiInvalidError). Older servers drop the field.
        """
        request = _request("POST", resource, namespace, body=manifest)
        request = msgspec.structs.replace(request, query=_STRICT)
        return await self._typed(request, kind)

    async def replace(
        self,
        resource: Resource,
        namespace: str,
        manifest: Mapping[str, Any],
        kind: type[T],
        subresource: str = "",
    ) -> T:
        """Replace the object of this name.

        If it has metadata.resourceVersion, only that version is replaced; otherwise
        ApiConflictError.
        """
        name = manifest["metadata"]["name"]
        request = _request("PUT", resource, namespace, name, subresource, body=manifest)
        return await self._typed(request, kind)

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        kind: type[T],
        subresource: str = "",
    ) -> T:
        """Merge `patch` into the object (RFC 7396); `subresource` "status" or "scale", or "".

        If the patch has metadata.resourceVersion, only that version is changed; otherwise
        ApiConflictError.
        """
        request = _request("PATCH", resource, namespace, name, subresource, body=patch)
        return await self._typed(request, kind)

    async def delete(
        self, resource: Resource, namespace: str, name: str, how: Deletion | None = None
    ) -> None:
        """Delete the object, or begin to.

        ApiNotFoundError if there is none, ApiConflictError if it has another uid or version than
        `how` requires.
        """
        body = (how or Deletion()).body()
        await self._http.ask(_request("DELETE", resource, namespace, name, body=body))

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """Return the answer for a path that names no object: /version, /apis, a pod's log."""
        return await self._http.ask(ApiRequest("GET", path, path, dict(query or {})))

    def watch(
        self,
        resource: Resource,
        namespace: str,
        kind: type[T],
        from_version: str,
        selector: Selector = EVERYTHING,
        watch_s: float = WATCH_S,
    ) -> AsyncGenerator[SeenObject[T], None]:
        """Yield the events after `from_version`, without end; see `follow`.

        The iterating task has to close it (`aclose`), because it holds a connection.
        """
        request = _request("GET", resource, namespace)
        request = msgspec.structs.replace(request, query=selector.query())
        return follow(self._http, request, kind, from_version, watch_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _typed(self, request: ApiRequest, kind: type[T]) -> T:
        content = await self._http.ask(request)
        return decoded(content, kind, request.label, self.access.where)


_VERBS = {
    "GET": "get",
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}


def _request(
    method: str,
    resource: Resource,
    namespace: str,
    name: str = "",
    subresource: str = "",
    body: Mapping[str, Any] | None = None,
) -> ApiRequest:
    verb = "list" if method == "GET" and not name else _VERBS[method]
    what = resource.label(namespace if resource.namespaced else "", name)
    return ApiRequest(
        method,
        resource.path(namespace, name, subresource),
        f"{verb} {what}" + (f" ({subresource})" if subresource else ""),
        body=msgspec.json.encode(body) if body is not None else b"",
        content_type=_MERGE_PATCH if method == "PATCH" else _JSON,
    )


# After this long without an event the object is read, since a cut-off watch gets no events.
LOOK_S = 10.0
_PAUSE_S = 0.1
# ... and after a watch that broke, or is not allowed.
_BROKEN_PAUSE_S = 1.0


async def follow_one(
    api: Api, resource: Resource, namespace: str, name: str, kind: type[T]
) -> AsyncGenerator[T | None, None]:
    """Yield the current object, None while it does not exist, and again at each change and read.

    A Role can allow an account to read and watch this one name, and not to list all objects.
    Raises the ApiError of a read; a broken watch only leads to another read.

    A watch without a version begins with the objects in the server's memory, which may be older
    than the object that was read. Such older events are left out.
    """
    begin, newest = "", 0
    while True:
        raw = await api.find(resource, namespace, name, msgspec.Raw)
        version = ""
        if raw is None:
            yield None
        else:
            label, where = f"get {resource.label(namespace, name)}", api.access.where
            version = decoded(raw, Versioned, label, where).metadata.resourceVersion
            newest = max(newest, _number(version, newest))
            yield decoded(raw, kind, label, where)
        # The watch begins at the version that was read, or now if the server has dropped that one.
        watch = api.watch(
            resource, namespace, kind, "" if begin == "gone" else version, one(name), LOOK_S
        )
        begin = ""
        pause_s = _PAUSE_S
        until_s = asyncio.get_running_loop().time() + LOOK_S
        async with contextlib.aclosing(watch):
            try:
                while True:
                    # The timeout is not around the yield, where it would cancel the iterating task.
                    async with asyncio.timeout_at(until_s):
                        seen = await anext(watch)
                    number = _number(seen.version, newest + 1)
                    if seen.change != "BOOKMARK" and number > newest:
                        newest = number
                        yield None if seen.change == "DELETED" else seen.object
            except TimeoutError:
                pass
            except ApiGoneError:
                begin = "gone"
            except ApiError:  # The next read shows whether the server is away.
                pause_s = _BROKEN_PAUSE_S
        await asyncio.sleep(pause_s)


def _number(version: str, otherwise: int) -> int:
    """Return a resourceVersion as a number; `otherwise` if it is not a number."""
    return int(version) if version.isascii() and version.isdecimal() else otherwise
