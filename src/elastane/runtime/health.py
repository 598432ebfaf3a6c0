"""Small answers by HTTP, and the health check: 200 while there are signs of life, else 503.

For probes and scrapers of a cluster: one answer a connection. It runs in the event loop that it
speaks for: a loop that stands still answers nothing, which a probe takes for a failure too. It owns
its socket and nothing else; a port that is taken is an OSError of `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

# What a probe sends is a few hundred bytes, and comes at once.
_REQUEST_BYTES_MAX = 8 << 10
_REQUEST_S = 5.0
# A probe is answered at once; who holds more than these open is slow on purpose, and the one that
# waited longest makes room: the descriptors are the agent's, which needs them for workers.
_CONNECTIONS_MAX = 64
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Answer:
    """What is said: a status of `_REASONS`, a body, and what that is."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class AnswerServer:
    """Gives `answer(method, path)` to each connection on `port`, and closes it.

    What is no request of HTTP has the method "" and the path "". The path comes without its query.
    """

    def __init__(self, answer: Callable[[str, str], Answer], port: int) -> None:
        self._answer = answer
        self._wished_port = port
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def start(self) -> None:
        """Listen on all addresses of this host; raises OSError where the port is taken."""
        self._server = await asyncio.start_server(
            self._serve, None, self._wished_port, limit=_REQUEST_BYTES_MAX
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "start() comes first"
        # With port 0 each address family has one of its own; IPv4's comes first here.
        sockets = sorted(self._server.sockets, key=lambda sock: sock.family != socket.AF_INET)
        port: int = sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        # Who asks badly, slowly, or goes away gets no answer, and harms nobody.
        bad = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*bad):
            async with asyncio.timeout(_REQUEST_S):
                method, path = _asked(await reader.readuntil(b"\r\n\r\n"))
                writer.write(_worded(self._answer(method, path), bodiless=method == "HEAD"))
                await writer.drain()
        self._open.pop(writer, None)
        writer.close()


class HealthServer(AnswerServer):
    """Answers on `port` whether `alive_s()`, a time since 1970, is at most `timeout_s` ago.

    Any path and any method will do.
    """

    def __init__(self, alive_s: Callable[[], float], port: int, timeout_s: float = 60.0) -> None:
        super().__init__(self._health, port)
        self._alive_s = alive_s
        self._timeout_s = timeout_s

    def _health(self, _method: str, _path: str) -> Answer:
        silent_s = max(0.0, time.time() - self._alive_s())
        status = 200 if silent_s <= self._timeout_s else 503
        body = json.dumps({"alive": status == 200, "silent_s": round(silent_s, 3)}).encode() + b"\n"
        return Answer(status, body, "application/json")


def _asked(head: bytes) -> tuple[str, str]:
    """Return method and path of a request; two empty texts for what is none."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return "", ""
    return words[0], words[1].partition("?")[0]


def _worded(answer: Answer, *, bodiless: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bodiless else answer.body)
