"""HTTP answers for probes and scrapers of a cluster, and the health check: 200 or 503.

The server sends one answer per connection. It runs in the event loop whose health it reports, so a
blocked loop does not answer, which a probe counts as a failure too. It owns its socket; `start`
raises OSError if the port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastane.process.endpoint import Unproven

# A probe sends a few hundred bytes at once.
_REQUEST_BYTES_MAX = 8 << 10
_REQUEST_S = 5.0
# A probe is answered at once, so many open connections are slow on purpose. At this bound the
# oldest connection is closed: the agent needs the descriptors for workers.
_CONNECTIONS_MAX = 64
# A probe's request follows its connection within a round trip.
_UNPROVEN_MIN_S = 0.1
# A probe therefore waits 0.2 s behind a full queue; a Kubernetes probe times out after 1 s.
_BACKLOG = 128
# The pause if the system has no descriptor or memory for another connection.
_EXHAUSTED_PAUSE_S = 0.5
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer: a status of `_REASONS`, a body, and the body's type."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or on all addresses of this host if it is "".

    Raises OSError if the port is taken, or the address is not of this host.
    """
    dual = not host and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if dual or ":" in host else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=dual,
    )


class AnswerServer:
    """Sends `answer(method, path)` to each connection on `port`, then closes it.

    `host`: the address to listen on; all addresses of this host by default.

    A request that is not HTTP has the method "" and the path "". The path comes without its query.
    """

    def __init__(self, answer: Callable[[str, str], HttpAnswer], port: int, host: str = "") -> None:
        self._answer = answer
        self._address = (host, port)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open = Unproven[asyncio.Task[None]](_CONNECTIONS_MAX, _UNPROVEN_MIN_S)

    async def start(self, listener: socket.socket | None = None) -> None:
        """Answer on `listener`, or listen first; raises OSError as `listening_socket` does."""
        self._listener = listener or listening_socket(*self._address)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._listener is not None, "start() comes first"
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening, and drop the open connections."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._accepting = None
        for serving in self._open:
            serving.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections one by one, within the bound."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._open.wait_s(loop.time()))
            try:
                sock, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)
                continue
            if (oldest := self._open.make_room()) is not None:
                oldest.cancel()
            serving = loop.create_task(self._serve(sock))
            self._open.add(serving, loop.time())
            serving.add_done_callback(self._open.discard)

    async def _serve(self, sock: socket.socket) -> None:
        # Malformed requests, slow requests and closed connections get no answer.
        bad = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with sock, contextlib.suppress(*bad):
            async with asyncio.timeout(_REQUEST_S):
                reader, writer = await asyncio.open_connection(sock=sock, limit=_REQUEST_BYTES_MAX)
                try:
                    method, path = _parse_request(await reader.readuntil(b"\r\n\r\n"))
                    writer.write(
                        _encode_answer(self._answer(method, path), bodiless=method == "HEAD")
                    )
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
                finally:
                    writer.transport.abort()


class HealthServer(AnswerServer):
    """Answers 200 if `alive_s()`, in seconds since 1970, is at most `timeout_s` ago, else 503.

    It ignores path and method.
    """

    def __init__(self, alive_s: Callable[[], float], port: int, timeout_s: float = 60.0) -> None:
        super().__init__(self._health, port)
        self._alive_s = alive_s
        self._timeout_s = timeout_s

    def _health(self, _method: str, _path: str) -> HttpAnswer:
        silent_s = max(0.0, time.time() - self._alive_s())
        status = 200 if silent_s <= self._timeout_s else 503
        body = json.dumps({"alive": status == 200, "silent_s": round(silent_s, 3)}).encode() + b"\n"
        return HttpAnswer(status, body, "application/json")


def _parse_request(head: bytes) -> tuple[str, str]:
    """Return method and path of a request; two empty texts if it is not HTTP."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return "", ""
    return words[0], words[1].partition("?")[0]


def _encode_answer(answer: HttpAnswer, *, bodiless: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bodiless else answer.body)
