"""A worker's main function with torch's worker server beside it, where the launcher wants one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from elastane.elastic.multiprocessing.errors import record

__all__ = ["worker_main"]
TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_ANSWER_WAIT_S = 5.0


@record
@contextmanager
def worker_main() -> Generator[None, None, None]:
    """Record errors of what runs within, as a context or a decorator, and serve torch's handlers.

    The server (ping, stacks, flight recorder) listens on the unix socket that
    TORCH_WORKER_SERVER_SOCKET names; without the variable there is none.
    """
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    if path is None:
        yield
        return
    from torch._C._distributed_c10d import _WorkerServer

    server = _WorkerServer(path)
    try:
        yield
    finally:
        # torch's shutdown blocks for ever, with the interpreter's lock, where the server's thread
        # has not begun to serve: a main function can be that short.
        if _answers(path):
            server.shutdown()


def _answers(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_ANSWER_WAIT_S)
        client.connect(path)
        client.sendall(b"GET /handler/ping HTTP/1.0\r\n\r\n")
        return bool(client.recv(1))
    return False
