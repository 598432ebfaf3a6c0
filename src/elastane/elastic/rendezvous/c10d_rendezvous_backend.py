"""A register in a key of a torch store (TCPStore, FileStore, HashStore), over `compare_set`.

The module is for callers that pass their own store to `DynamicRendezvousHandler.from_backend`. The
backend named c10d does not use it, and survives the loss of any host except the endpoint's.
"""

from __future__ import annotations

import asyncio
import binascii
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from elastane.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
)
from elastane.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from elastane.elastic.rendezvous.utils import parse_rendezvous_endpoint
from elastane.errors import MembershipError
from elastane.process.endpoint import is_mine
from elastane.process.resolver import resolve

DEFAULT_PORT = 29400
# A store's get waits for its key, so the key is created at the start, with a value that is not
# base64.
_NOTHING = b"-"


class C10dRendezvousBackend(RendezvousBackend):
    """A register in one key. The token is the value itself, as `compare_set` takes it."""

    def __init__(self, store: Store, run_id: str) -> None:
        if not run_id:
            raise ValueError("run_id = '': expected the job's id")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._call(lambda: store.compare_set(self._key, "", _NOTHING.decode()))

    @property
    def name(self) -> str:
        """See RendezvousBackend."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See RendezvousBackend."""
        return _decode(self._call(lambda: self._store.get(self._key)))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See RendezvousBackend. Two writers of identical bytes both succeed."""
        if token and not isinstance(token, bytes):
            found = self.get_state()
            return (*found, False) if found else None
        expected = (token or _NOTHING).decode()
        wanted = b64encode(state).decode()
        found = _decode(self._call(lambda: self._store.compare_set(self._key, expected, wanted)))
        return (*found, found[0] == state) if found else None

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(f"the torch store failed: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Make the store that `params` describe, and a backend in it.

    Parameters are store_type (tcp or file), read_timeout (seconds, 60) and is_host. For tcp the
    endpoint is HOST:PORT, for file a path.
    """
    kind = params.get("store_type", "tcp").strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(f"rendezvous configuration store_type = {kind!r}: expected tcp or file")
    store = _tcp_store(params) if kind == "tcp" else _file_store(params)
    return C10dRendezvousBackend(store, params.run_id), store


def _tcp_store(params: RendezvousParameters) -> Store:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    is_host_given = params.get_as_bool("is_host")
    timeout_s = params.get_as_int("read_timeout", 60) or 0
    if timeout_s <= 0:
        raise ValueError(
            f"rendezvous configuration read_timeout = {timeout_s}: expected 1 or more seconds"
        )
    is_host = _is_this_machine(host) if is_host_given is None else is_host_given
    # Several nodes may share this machine: if another serves the port, this one is a client.
    tries = [True, False] if is_host and is_host_given is None else [is_host]
    for serves in tries:
        try:
            timeout = timedelta(seconds=timeout_s)
            return TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timeout)
        except (ValueError, RuntimeError, TimeoutError) as error:
            failure = error
    raise RendezvousConnectionError(f"no store at {host}:{port}: {failure}") from failure


def _file_store(params: RendezvousParameters) -> Store:
    try:
        path = params.endpoint or tempfile.mkstemp()[1]
        return FileStore(str(Path(path)))
    except OSError as error:
        raise RendezvousError(f"no file for the store: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"no store at {path}: {error}") from error


def _decode(value: bytes) -> tuple[bytes, Token] | None:
    if value == _NOTHING:
        return None
    try:
        return b64decode(value, validate=True), value
    except binascii.Error as error:
        raise RendezvousStateError(
            f"the value in the torch store is not base64: {error}"
        ) from error


def _is_this_machine(host: str) -> bool:
    """Whether `host` is this machine, by any of its addresses."""
    try:
        return host == "localhost" or is_mine(asyncio.run(resolve(host)))
    except MembershipError:
        return False
