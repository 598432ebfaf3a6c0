"""Serves connections at sockets that listen, each in a thread, up to a limit."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

# Nodes that came, those that were too many, and connections of other programs.
CONNECTIONS_MAX = 256


class ConnectionServer:
    """Calls `serve` with each connection until closed.

    A connection is closed when `serve` returns. One beyond CONNECTIONS_MAX is closed at once.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], serve: Callable[[socket.socket], None]
    ) -> None:
        self._listeners, self._call = listeners, serve
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def start(self) -> None:
        """Begin to accept."""
        for sock in self._listeners:
            sock.setblocking(True)
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting; connections end by themselves."""
        for sock in self._listeners:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                self._call(sock)
        finally:
            self._room.release()


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection; raises OSError if it ends before."""
    found = bytearray()
    while len(found) < size:
        more = sock.recv(min(1 << 16, size - len(found)))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        found += more
    return bytes(found)
