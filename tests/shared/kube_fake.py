"""An API server for tests, in this process: real HTTP, objects in memory, and faults at will.

`async with FakeKube() as kube`: lists in pages, watches with bookmarks, conflicts, 410 Gone.
`kube.inject(...)` adds a fault. After `kube.banish(token)` no request of a client is carried out or
answered, as if it was killed or cut off. Every write is in `kube.writes`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import urllib.parse
from dataclasses import dataclass, field

from kube_fake_store import Objects, RefusedError, Where, copied, told_as, where_of

BOOKMARK_S = 0.5
_WATCH_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_REASONS = {200: "OK", 201: "Created", 403: "Forbidden", 404: "Not Found", 409: "Conflict"}


@dataclass
class Fault:
    """What happens to the next `times` requests of a method and path.

    `status`: the answer; `before`: the connection breaks and nothing was done; `after`: it breaks
    when it was done; `delay_s`: it is slow; `garbage`: the answer is none; `hang`: there is none.
    """

    method: str
    path: re.Pattern
    times: int = 1
    skip: int = 0
    status: int = 0
    reason: str = ""
    message: str = ""
    details: dict | None = None
    headers: dict = field(default_factory=dict)
    before: bool = False
    after: bool = False
    garbage: bool = False
    hang: bool = False
    delay_s: float = 0.0


NO_FAULT = Fault("", re.compile(""))


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict
    body: dict
    token: str

    @property
    def where(self):
        return where_of(self.path)

    @property
    def is_watch(self):
        return self.query.get("watch") in ("1", "true")


class _BrokenError(Exception):
    """The connection is to end here."""


class FakeKube:
    def __init__(self):
        self.objects = Objects()
        self.faults = []
        self.requests = []
        self.banished = set()
        self.refuses = lambda request: None  # an admission webhook: RefusedError or None
        self.wrote = lambda request: None  # called after each write was done
        self.silent = set()  # kinds (plural) of which watches say nothing, and do not end
        self.url = ""
        self._server = None
        self._last_list = (None, [])
        self._watches = set()
        self._connections = {}
        self._changed = asyncio.Event()
        self.objects.changed.append(lambda _: self._changed.set())

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def stop(self):
        """Be away: connections break, new ones are refused."""
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def start_again(self):
        port = int(self.url.rpartition(":")[2])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 24)

    # What a test does.

    def inject(self, method, path, **what):
        fault = Fault(method, re.compile(path), **what)
        self.faults.append(fault)
        return fault

    def banish(self, token):
        self.banished.add(token)
        for writer, tokens in list(self._connections.items()):
            if token in tokens:
                writer.transport.abort()

    def cut_watches(self):
        for writer in list(self._watches):
            writer.transport.abort()

    @property
    def writes(self):
        """(method, plural, name) of every write that was asked for, leases and events left out."""
        found = []
        for request in self.requests:
            at = request.where if request.method != "GET" else None
            if at and at.plural not in ("leases", "events"):
                name = at.name or request.body.get("metadata", {}).get("name", "")
                found.append(
                    (
                        request.method,
                        at.plural + (f"/{at.subresource}" if at.subresource else ""),
                        name,
                    )
                )
        return found

    def all(self, plural, namespace="default", group=""):
        return [copied(one) for one in self.objects.listed(Where(group, plural, namespace))]

    def one(self, plural, name, namespace="default", group=""):
        return copied(self.objects.get(Where(group, plural, namespace, name)))

    def create(self, plural, body, namespace="default", group=""):
        return self.objects.create(Where(group, plural, namespace), copied(body))

    def patch(self, plural, name, patch, *, namespace="default", group="", subresource=""):
        return self.objects.patch(Where(group, plural, namespace, name, subresource), patch)

    def delete(self, plural, name, namespace="default", group="", **options):
        return self.objects.delete(Where(group, plural, namespace, name), options)

    async def wait(self, condition, what="it", timeout_s=30.0):
        """Wait until a condition of the server's state holds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (found := condition()):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._changed.wait()
                return found
        raise AssertionError(f"{what} did not come about; writes: {self.writes[-20:]}")

    # What the server does.

    async def _serve(self, reader, writer):
        self._connections[writer] = set()
        broken = (OSError, _BrokenError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with contextlib.suppress(*broken):
                while True:
                    request = await self._read(reader)
                    self._connections[writer].add(request.token)
                    await self._answer(request, writer)
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    async def _read(self, reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        path, _, query = target.partition("?")
        return Request(
            method,
            urllib.parse.unquote(path),
            dict(urllib.parse.parse_qsl(query)),
            json.loads(content) if content else {},
            headers.get("authorization", "").removeprefix("Bearer "),
        )

    async def _answer(self, request, writer):
        fault = self._fault(request) or NO_FAULT
        await asyncio.sleep(3600 if fault.hang else fault.delay_s)
        if fault.before or request.token in self.banished:
            raise _BrokenError
        self.requests.append(request)
        if fault.garbage:
            self._send(writer, 200, b"<html>sign in</html>")
            return
        try:
            if fault.status:
                reason = fault.reason or "Injected"
                raise RefusedError(fault.status, reason, fault.message, fault.details)
            if request.is_watch:
                await self._watch(request, writer)
                return
            answer = self._do(request)
        except RefusedError as refused:
            self._send(writer, refused.code, json.dumps(refused.body).encode(), fault.headers)
            return
        if request.method != "GET":
            self.wrote(request)
        if fault.after or request.token in self.banished:
            raise _BrokenError
        self._send(writer, 201 if request.method == "POST" else 200, answer)
        await writer.drain()

    def _fault(self, request):
        for fault in self.faults:
            if fault.method in (request.method, "*", "WATCH" if request.is_watch else ""):
                if fault.method == "GET" and request.is_watch:
                    continue
                if not fault.path.search(request.path):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times:
                    fault.times -= 1
                    return fault
        return None

    def _do(self, request):
        at = request.where
        refused = self.refuses(request)
        if refused is not None:
            raise refused if isinstance(refused, RefusedError) else _BrokenError
        if request.method == "GET" and not at.name:
            return self._page(at, request.query)
        if at.subresource == "scale":
            return self._scale(at, request)
        if request.method == "GET":
            done = self.objects.get(at)
        elif request.method == "POST":
            done = self.objects.create(at, request.body)
        elif request.method == "PUT":
            done = self.objects.write(at, request.body)
        elif request.method == "PATCH":
            done = self.objects.patch(at, request.body)
        else:
            done = self.objects.delete(at, request.body)
        return json.dumps(done).encode()

    def _scale(self, at, request):
        at = Where(at.group, at.plural, at.namespace, at.name)
        if request.method != "GET":
            replicas = request.body["spec"]["replicas"]
            self.objects.patch(at, {"spec": {"replicaSpecs": {"Worker": {"replicas": replicas}}}})
        spec = self.objects.get(at)["spec"]["replicaSpecs"]["Worker"]
        return json.dumps({"kind": "Scale", "spec": {"replicas": spec.get("replicas")}}).encode()

    def _page(self, at, query):
        limit = int(query.get("limit", "0"))
        start, version = 0, self.objects.version
        if "continue" in query:
            start, version = json.loads(base64.b64decode(query["continue"]))
            if version < self.objects.compacted:
                raise RefusedError(410, "Expired", "the continue token is too old")
        selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
        found = self._listed(at, selectors)
        part = found[start : start + limit] if limit else found
        meta = {"resourceVersion": str(version)}
        if limit and start + limit < len(found):
            token = json.dumps([start + limit, version]).encode()
            meta["continue"] = base64.b64encode(token).decode()
        return json.dumps({"kind": "List", "metadata": meta, "items": part}).encode()

    def _listed(self, at, selectors):
        """What a list has; the pages of one are cut out of the same, as long as nothing changes."""
        key = (at, selectors, self.objects.version)
        if self._last_list[0] != key:
            self._last_list = (key, self.objects.listed(at, *selectors))
        return self._last_list[1]

    async def _watch(self, request, writer):
        at, query = request.where, request.query
        version = int(query.get("resourceVersion") or self.objects.version)
        selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
        if version < self.objects.compacted:
            raise RefusedError(410, "Expired", f"too old resource version: {version}")
        waiting = asyncio.Queue()
        for event in self.objects.history:
            if event.version > version:
                waiting.put_nowait(event)
        self.objects.changed.append(waiting.put_nowait)
        self._watches.add(writer)
        writer.write(_WATCH_HEAD)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds", 60))):
                while True:
                    await self._tell(request, writer, waiting, at, selectors)
        except TimeoutError:
            writer.write(b"0\r\n\r\n")
        finally:
            self.objects.changed.remove(waiting.put_nowait)
            self._watches.discard(writer)

    async def _tell(self, request, writer, waiting, at, selectors):
        """Send one event, or a bookmark where there is none for a while."""
        event = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BOOKMARK_S):
                event = await waiting.get()
        if at.plural in self.silent or request.token in self.banished:
            return
        if event is None:
            mark = {"metadata": {"resourceVersion": str(self.objects.version)}}
            _chunk(writer, {"type": "BOOKMARK", "object": mark})
        elif change := told_as(event, at, *selectors):
            _chunk(writer, {"type": change, "object": event.after})
        await writer.drain()

    def _send(self, writer, status, body, headers=None):
        words = {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}
        lines = "".join(f"{key}: {value}\r\n" for key, value in words.items())
        head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\n{lines}\r\n"
        writer.write(head.encode() + body)


def _chunk(writer, message):
    line = json.dumps(message).encode() + b"\n"
    writer.write(b"%x\r\n%s\r\n" % (len(line), line))
