"""A process that serves one attempt's process-group store on a socket that is already open.

Workers' connections queue in the socket's backlog until this listens to them, so none is ever
refused (a refused client sleeps half a second, torch 2.13). It ends when it is killed; an error
of the store ends it with a traceback on stderr. Owns nothing else.
"""

from __future__ import annotations

import signal
import socket
import sys


def serve(fd: int) -> None:
    """Serve the store on the listening descriptor `fd` until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(fileno=fd)
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


if __name__ == "__main__":
    serve(int(sys.argv[1]))
