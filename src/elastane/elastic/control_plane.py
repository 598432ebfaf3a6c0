"""A context for a worker's main function: it records errors, and serves torch's debug handlers."""

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
    """Record errors of the code inside, as a context or a decorator, and run torch's worker server.

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
        # torch's shutdown blocks forever, holding the GIL, if the server's thread has not begun to
        # serve. A short main function can end that early.
        if _answers(path):
            server.shutdown()


def _answers(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_ANSWER_WAIT_S)
        client.connect(path)
        client.sendall(b"GET /handler/ping HTTP/1.0\r\n\r\n")
        return bool(client.recv(1))
    return False
