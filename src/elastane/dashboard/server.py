"""Serves the page, its data and its stream; it only reads.

A stream sends the sections of a job that have changed, at most twice a second, and a heartbeat
otherwise. Its ids let a browser that lost the connection continue: the next message has what
changed since. Nothing is queued for a browser: one that does not read gets the newest state when it
reads again. Streams are bounded here, and connections in `connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastane.dashboard.connections import prove
from elastane.dashboard.following import FollowedJob, JobPublication, Jobs
from elastane.dashboard.guard import COOKIE, HEADERS, Guard, RequestRefusal
from elastane.dashboard.index import EventFilter
from elastane.dashboard.outputs import WorkerChoice, tail_of
from elastane.observe.heat import heat_of

HEARTBEAT_S = 2.0
# A person has some windows open; a request beyond this gets an error, and may be repeated.
STREAMS_MAX = 128
_FORM_BYTES_MAX = 8 << 10
_PAGE_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "dom.js": "text/javascript",
    "panels.js": "text/javascript",
}
_EVENT_ID = re.compile(r"([0-9a-f]{8})-(\d{1,15})")


class RequestError(Exception):
    """A request that cannot be answered, with its status."""

    def __init__(self, status: int, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.next_step = next_step


class Entrance:
    """Asks the guard about every request, and adds its headers to every answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        server = (scope.get("server") or ("", 0))[0]
        refusal = self._guard.refusal(scope["method"], headers, server)
        answer = _refused(refusal) if refusal else self._unproven(scope, headers)
        await (answer or self._app)(scope, receive, guarded)

    def _unproven(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        path = scope["path"]
        if self._guard.is_proven(headers):
            prove(scope)
            return None
        if path in ("/login", "/page.css"):
            return None
        if path == "/":
            return RedirectResponse("/login", status_code=303)
        next_step = "open /login, or send the token as Authorization: Bearer"
        return _error(401, "the job's token is missing or wrong", next_step)


def _refused(refusal: RequestRefusal) -> Response:
    return _error(refusal.status, refusal.what, refusal.next_step)


def _error(status: int, what: str, next_step: str = "") -> Response:
    return _json({"error": what, "next": next_step}, status)


async def _unanswered(_: Request, error: Exception) -> Response:
    """Answer a request that no route takes."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Stream:
    """One answer that is a stream of server-sent events of a job."""

    def __init__(self, job: FollowedJob, server_id: str, number: int) -> None:
        self._job = job
        self._server_id = server_id
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the browser leaves, or does not read."""
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        self._job.watchers += 1
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.watchers -= 1
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        while True:
            found = await self._job.next_publication(self._number, HEARTBEAT_S)
            body = self._message(found)
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _message(self, found: JobPublication | None) -> bytes:
        changed: dict[str, Any] = {"now_s": time.time()}
        if found is not None:
            changed |= found.since(self._number)
            self._number = found.number
        data = msgspec.json.encode(changed)
        return b"id: %s-%d\ndata: %s\n\n" % (self._server_id.encode(), self._number, data)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class DashboardServer:
    """The answers to all requests about `jobs`."""

    def __init__(self, jobs: Jobs, guard: Guard) -> None:
        self._jobs = jobs
        self._guard = guard
        self._streams = 0
        page = files("elastane.dashboard") / "page"
        self._files = {name: (page / name).read_bytes() for name in (*_PAGE_FILES, "index.html")}
        self._login = (page / "login.html").read_bytes()

    def app(self) -> ASGIApp:
        """Return the application."""
        answers: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/": self._index,
            "/api/jobs": self._listed,
            "/api/jobs/{key}": self._snapshot,
            "/api/jobs/{key}/series": self._series,
            "/api/jobs/{key}/heat": self._heat,
            "/api/jobs/{key}/events": self._events,
            "/api/jobs/{key}/incidents/{number:int}": self._incident,
            "/api/jobs/{key}/log": self._log,
            **{f"/{name}": self._file for name in _PAGE_FILES},
        }
        routes = [Route(path, _answered(answer)) for path, answer in answers.items()]
        routes.append(Route("/api/jobs/{key}/stream", _ByScope(self._stream)))
        routes.append(Route("/login", self._log_in, methods=["GET", "POST"]))
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _unanswered},
        )
        return Entrance(app, self._guard)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._jobs.close()

    async def _index(self, _: Request) -> Response:
        return Response(self._files["index.html"], media_type="text/html; charset=utf-8")

    async def _file(self, request: Request) -> Response:
        name = request.url.path.lstrip("/")
        return Response(self._files[name], media_type=f"{_PAGE_FILES[name]}; charset=utf-8")

    async def _log_in(self, request: Request) -> Response:
        if not self._guard.asks_for_token:
            return RedirectResponse("/", status_code=303)
        if request.method == "POST":
            body = b""
            async for piece in request.stream():
                body += piece
                if len(body) > _FORM_BYTES_MAX:
                    return _error(413, "a form of this size is none of the page's")
            if self._guard.is_token(body.decode("utf-8", "replace").partition("token=")[2]):
                answer = RedirectResponse("/", status_code=303)
                cookie = self._guard.cookie()
                answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict")
                return answer
        status = 401 if request.method == "POST" else 200
        return Response(self._login, status, media_type="text/html; charset=utf-8")

    async def _listed(self, _: Request) -> Any:
        listed = await asyncio.to_thread(self._jobs.listed)
        chosen = self._jobs.chosen.name if self._jobs.chosen is not None else ""
        return {"chosen": chosen, "jobs": listed}

    async def _job(self, key: str) -> FollowedJob:
        job = await self._jobs.follow(key)
        if job is None:
            raise RequestError(404, f"no job {key[:80]!r} here", "GET /api/jobs lists them")
        return job

    async def _snapshot(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        found = await job.next_publication(0, HEARTBEAT_S) or job.publication
        stream_id = f"{self._jobs.server_id}-{found.number}"
        return {"id": stream_id, "now_s": time.time(), **found.since(0)}

    async def _stream(self, scope: Scope) -> ASGIApp:
        job = await self._job(scope["path_params"]["key"])
        if self._streams >= STREAMS_MAX:
            raise RequestError(503, f"{STREAMS_MAX} windows are open", "close some, or come again")
        query = Request(scope).query_params
        last = Headers(scope=scope).get("last-event-id") or query.get("after", "")
        known = _EVENT_ID.fullmatch(last)
        is_ours = known is not None and known[1] == self._jobs.server_id
        number = int(known[2]) if known is not None and is_ours else 0
        stream = Stream(job, self._jobs.server_id, min(number, job.publication.number))
        return self._counted(stream)

    def _counted(self, stream: Stream) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            self._streams += 1
            try:
                await stream(scope, receive, send)
            finally:
                self._streams -= 1

        return run

    async def _series(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        return job.series(*_span(request))

    async def _heat(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        return heat_of(job.view, *_span(request))

    async def _events(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        asked = request.query_params
        before = int(_number(request, "before")) if asked.get("before") else None
        return await job.events(
            EventFilter(
                before=before,
                group=asked.get("group", ""),
                node=asked.get("node", ""),
                text=asked.get("text", "")[:200],
                incident=int(_number(request, "incident")) if asked.get("incident") else 0,
            )
        )

    async def _log(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        asked = request.query_params
        wanted = WorkerChoice(
            node=asked.get("node", "")[:200],
            local_rank=int(_number(request, "local_rank")),
            std="stdout" if asked.get("std") == "stdout" else "stderr",
            round=int(_number(request, "round")) if asked.get("round") else None,
            rank=int(_number(request, "rank")) if asked.get("rank") else None,
        )
        found = await asyncio.to_thread(tail_of, job.folder, wanted)
        if found is None:
            what = (
                f"no output of local rank {wanted.local_rank} of {wanted.node!r} is in {job.folder}"
            )
            raise RequestError(404, what, "look on that node, or give all nodes one --log-dir")
        return found

    async def _incident(self, request: Request) -> Any:
        job = await self._job(request.path_params["key"])
        number = request.path_params["number"]
        incident = job.incident(number)
        if incident is None:
            raise RequestError(404, f"no incident {number} in this job")
        return incident


class _ByScope:
    """An ASGI application that is chosen for each request, or an error."""

    def __init__(self, choose: Callable[[Scope], Awaitable[ASGIApp]]) -> None:
        self._choose = choose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the chosen application."""
        try:
            app = await self._choose(scope)
        except RequestError as error:
            app = _error(error.status, str(error), error.next_step)
        await app(scope, receive, send)


def _answered(
    answer: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with JSON, or with a response as it is."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await answer(request)
        except RequestError as error:
            return _error(error.status, str(error), error.next_step)
        return found if isinstance(found, Response) else _json(found)

    return endpoint


def _span(request: Request) -> tuple[float, float]:
    """Return the span of time that is asked for, in seconds since 1970."""
    from_s, to_s = (_number(request, name) for name in ("from", "to"))
    if not 0.0 <= from_s < to_s <= 1e11:
        raise RequestError(400, f"from={from_s:g} to={to_s:g} is no span of time")
    return from_s, to_s


def _number(request: Request, name: str) -> float:
    text = request.query_params.get(name, "")
    if not re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text):
        raise RequestError(400, f"{name}={text[:40]!r} is no number")
    return float(text)
