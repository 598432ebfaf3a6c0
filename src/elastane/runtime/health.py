"""A health check by HTTP: 200 while somebody shows signs of life, else 503.

For liveness probes of a cluster: any path, any method, one answer a connection. It runs in the
event loop that it speaks for: a loop that stands still answers nothing, which a probe takes for a
failure too. It owns its socket and nothing else; a port that is taken is an OSError of `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable

# What a probe sends is a few hundred bytes, and comes at once.
_REQUEST_BYTES_MAX = 8 << 10
_REQUEST_S = 5.0
# A probe is answered at once; who holds more than these open is slow on purpose, and the one that
# waited longest makes room: the descriptors are the agent's, which needs them for workers.
_CONNECTIONS_MAX = 64
_REASONS = {200: "OK", 503: "Service Unavailable"}


class HealthServer:
    """Answers on `port` whether `alive_s()`, a time since 1970, is at most `timeout_s` ago."""

    def __init__(self, alive_s: Callable[[], float], port: int, timeout_s: float = 60.0) -> None:
        self._alive_s = alive_s
        self._wished_port = port
        self._timeout_s = timeout_s
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
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer())
                await writer.drain()
        self._open.pop(writer, None)
        writer.close()

    def _answer(self) -> bytes:
        silent_s = max(0.0, time.time() - self._alive_s())
        status = 200 if silent_s <= self._timeout_s else 503
        body = json.dumps({"alive": status == 200, "silent_s": round(silent_s, 3)}).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body
