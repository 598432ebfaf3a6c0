"""An HTTP server that sends exactly the bytes of a test, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from elastane.kubernetes.client import Api, ClusterAccess
from elastane.kubernetes.client.identity import FixedIdentity


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


def plain(status: int, content: object, *more: str) -> bytes:
    """Return an answer in one piece: text and bytes unchanged, anything else as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, default=repr)
    body = content if isinstance(content, bytes) else text.encode()
    head = [f"HTTP/1.1 {status} Told", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(content: bytes) -> bytes:
    """Return a piece of a chunked answer."""
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def line(**event: object) -> bytes:
    """Return one event of a watch, as a chunk."""
    return chunk(json.dumps(event).encode() + b"\n")


class HANG:
    """In an answer: send nothing more, and keep the connection."""


@dataclass
class Server:
    """Sends `answers` one after the other, and then repeats the last one."""

    answers: list[list[object]]
    asked: list[Asked] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client has gone.
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split()
        headers = dict(text.lower().split(": ", 1) for text in head[1:] if text)
        headers |= {k.split(": ", 1)[0].lower(): k.split(": ", 1)[1] for k in head[1:] if k}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.asked.append(Asked(method, parts.path, query, headers, body))
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for piece in said:
            if piece is HANG:
                await asyncio.Event().wait()
            assert isinstance(piece, bytes)
            writer.write(piece)
            await writer.drain()
        return bool(said)


def served(
    *answers: object,
) -> Callable[[Callable[[Server], Awaitable[None]]], Callable[[], None]]:
    """Run a test against a server that gives these answers."""

    def decorate(test: Callable[[Server], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            async def bounded() -> None:
                lists = [one if isinstance(one, list) else [one] for one in answers]
                async with asyncio.timeout(60), Server([*lists]) as server:
                    await test(server)

            asyncio.run(bounded())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


class Thing(msgspec.Struct):
    metadata: dict[str, Any]


def access(server, identity=None):
    return ClusterAccess(server.url, identity or FixedIdentity(), namespace="ns", where="here")


def api(server, *, timeout_s=5.0, identity=None):
    return Api(access(server, identity), timeout_s=timeout_s)


def thing(name="x", version="7"):
    return {"metadata": {"name": name, "resourceVersion": version}}


def status(code, reason, message="the server's words"):
    return plain(code, {"kind": "Status", "reason": reason, "message": message, "code": code})
