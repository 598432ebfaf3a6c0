"""Creates a c10d store, and finds free ports. Source: ...elastic.utils.distributed."""

from __future__ import annotations

import datetime
import logging
import os
import socket
from contextlib import closing
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from elastane.elastic.utils.api import get_socket_with_port as _loopback_socket
from elastane.elastic.utils.store import barrier

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
_log = logging.getLogger(__name__)


def create_c10d_store(  # noqa: PLR0913, PLR0917 - torch's signature
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: Any = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """Return a TCPStore, served here if `is_server`; port -1 is any free one (one member only).

    With `wait_for_workers` it returns once all members are connected. ValueError for several
    members without a port, RuntimeError if the port is taken, TimeoutError if members do not come.
    """
    if use_libuv is not None:
        _log.warning("use_libuv has no effect: set USE_LIBUV=0 or 1 in the environment")
    if server_port == -1 and world_size > 1:
        raise ValueError(
            f"server_port must be specified when world_size > 1, got {server_port=}, {world_size=}"
        )
    attempts = retries if server_port == -1 else 1
    for attempt in range(attempts):
        port = server_port if server_port != -1 else get_free_port()
        try:
            store = TCPStore(
                host_name=server_addr,
                port=port,
                world_size=world_size,
                is_master=is_server,
                timeout=datetime.timedelta(seconds=timeout),
                wait_for_workers=wait_for_workers,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            if attempt == attempts - 1:
                raise RuntimeError(f"on {server_addr}, port: {port} already in use") from error
            continue
        if wait_for_workers:
            _wait_for_all(store, world_size, timeout)
        return store
    raise AssertionError("the last attempt returns or raises")


def get_free_port() -> int:
    """Return a port of localhost that is free now; another process may take it at any time."""
    with closing(get_socket_with_port()) as found:
        port: int = found.getsockname()[1]
        return port


def get_socket_with_port() -> socket.socket:
    """Return a socket bound to a free port of localhost."""
    return _loopback_socket()


def _wait_for_all(store: TCPStore, world_size: int, timeout_s: float) -> None:
    try:
        barrier(store, world_size, key_prefix="_tcp_store/num_members", barrier_timeout=timeout_s)
    except RuntimeError as error:
        raise TimeoutError(f"timed out waiting for all {world_size} members to join") from error
