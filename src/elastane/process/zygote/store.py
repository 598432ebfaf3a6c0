"""A process that serves one world's process-group store on a socket that is already open.

It is started before the world is known, and receives the socket through a channel. Workers'
connections queue in the socket's backlog until the store accepts them, so none is refused (a
refused client sleeps half a second, torch 2.13). It ends when it is killed, or when the channel is
closed before a socket came; an error of the store ends it with a traceback on stderr.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys


def send_listener(channel: socket.socket, listener: socket.socket) -> None:
    """Let the process at the other end of `channel` serve; raises OSError if it is gone."""
    socket.send_fds(channel, [b"\0"], [listener.fileno()])


def serve(fd: int) -> None:
    """Serve the store on the socket that comes through the descriptor `fd`, until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _look_up_no_names()
    with socket.socket(fileno=fd) as channel:
        _, received, _, _ = socket.recv_fds(channel, 1, 1)
    if not received:
        return
    listener = socket.socket(fileno=received[0])
    host, port = listener.getsockname()[:2]
    any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    store = TCPStore(
        any_address.get(host, host),
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while True:
        signal.pause()
        assert store.port == port


def _look_up_no_names() -> None:
    """Disable host name look-ups in this process.

    The store looks up the name of every address that connects, to log it, in its only serving
    thread. One lost packet of the resolver would block all clients for 5 s (torch 2.13).
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:  # glibc; other C libraries have no such setting
        configure(b"hosts", b"files")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
