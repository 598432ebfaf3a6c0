"""A client of the process-group store that waits only for the store itself, and can be interrupted.

torch's own client looks up the name of every address that it connects to, only to log it. Each
connection is a query to the machine's resolver, and takes 5 s if one packet of it is lost (torch
2.13; 3 of 60 starts here). It cannot be interrupted either. This client speaks the same protocol
(private to torch; `open` checks by a ping that the other side speaks it), over a socket of its own.

Fails with RuntimeError, as torch's client does: gloo passes it on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from datetime import timedelta
from enum import IntEnum

from torch._C._distributed_c10d import Store

_MAGIC = 0x3C85F7CE
_COUNT = struct.Struct("=Q")
_NUMBER = struct.Struct("=q")
_WORD = struct.Struct("=I")
_KEYS = "/"  # torch's client prefixes every key with this
# Pause before another attempt to reach a store that is not up yet.
_RETRY_S = 0.02
_VALUE_BYTES_MAX = 64 << 20


class _Query(IntEnum):
    VALIDATE = 0
    SET = 1
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    CANCEL_WAIT = 12
    PING = 13


class GroupStoreClient(Store):
    """One connection to a TCPStore; `interrupt`, from any thread, ends any wait in it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        super().__init__()
        self._where = (host, port)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._interrupted = threading.Event()

    def open(self) -> None:
        """Connect; retry until the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._interrupted.is_set():
                raise RuntimeError("the connection to the process-group store was interrupted")
            left_s = deadline - time.monotonic()
            try:
                self._socket = socket.create_connection(self._where, max(0.001, left_s))
                break
            except OSError as error:
                if left_s <= _RETRY_S:
                    raise RuntimeError(f"process-group store at {self._name}: {error}") from error
                self._interrupted.wait(_RETRY_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._interrupted.is_set():
            self.interrupt()  # it was interrupted before there was a socket
        self._check_protocol()

    def interrupt(self) -> None:
        """Make every operation fail, including one that waits now."""
        self._interrupted.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.interrupt()
        with self._lock:
            if self._socket is not None:
                self._socket.close()

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(_Query.SET, _text(key) + _COUNT.pack(len(raw)) + raw, 0)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        self.wait([key])
        with self._lock:
            self._send(_Query.GET, _text(key))
            (count,) = _COUNT.unpack(self._receive(_COUNT.size))
            if count > _VALUE_BYTES_MAX:
                raise RuntimeError(f"process-group store at {self._name}: {count} bytes in {key}")
            return self._receive(count)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""
        return self._number(_Query.ADD, _text(key) + _NUMBER.pack(amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._ask(_Query.CHECK, _texts(keys), 1) == b"\0"

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait until all keys exist; RuntimeError after `limit`."""
        limit_s = self._timeout_s if limit is None else limit.total_seconds()
        with self._lock:
            self._send(_Query.WAIT, _texts(keys))
            try:
                self._receive(1, limit_s)
            except TimeoutError:
                self._send(_Query.CANCEL_WAIT, b"")
                if self._receive(1) != b"\0":
                    raise RuntimeError(
                        f"process-group store at {self._name}: {keys[0]!r} did not come"
                        f" within {limit_s:g} s"
                    ) from None

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self._number(_Query.DELETE_KEY, _text(key)) == 1

    def set_timeout(self, limit: timedelta) -> None:
        """Bound later waits."""
        self._timeout_s = limit.total_seconds()

    @property
    def _name(self) -> str:
        return f"{self._where[0]}:{self._where[1]}"

    def _check_protocol(self) -> None:
        nonce = _WORD.pack(os.getpid())
        with self._lock:
            self._send(_Query.VALIDATE, _WORD.pack(_MAGIC))
            self._send(_Query.PING, nonce)
            if self._receive(len(nonce)) != nonce:
                raise RuntimeError(f"{self._name} does not speak the protocol of TCPStore")

    def _number(self, query: _Query, body: bytes) -> int:
        return int(_NUMBER.unpack(self._ask(query, body, _NUMBER.size))[0])

    def _ask(self, query: _Query, body: bytes, reply_bytes: int) -> bytes:
        with self._lock:
            self._send(query, body)
            return self._receive(reply_bytes)

    def _send(self, query: _Query, body: bytes) -> None:
        assert self._socket is not None, "open() comes first"
        try:
            self._socket.sendall(bytes((query,)) + body)
        except OSError as error:
            raise RuntimeError(f"process-group store at {self._name}: {error}") from error

    def _receive(self, count: int, limit_s: float | None = None) -> bytes:
        """Receive exactly `count` bytes; TimeoutError only if `limit_s` is given."""
        assert self._socket is not None, "open() comes first"
        parts: list[bytes] = []
        while count > 0:
            self._socket.settimeout(self._timeout_s if limit_s is None else max(0.001, limit_s))
            try:
                part = self._socket.recv(count)
            except TimeoutError as error:
                if limit_s is not None:
                    raise
                raise RuntimeError(f"process-group store at {self._name}: no answer") from error
            except OSError as error:
                raise RuntimeError(f"process-group store at {self._name}: {error}") from error
            if not part:
                raise RuntimeError(f"process-group store at {self._name}: connection closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _text(key: str) -> bytes:
    raw = (_KEYS + key).encode()
    return _COUNT.pack(len(raw)) + raw


def _texts(keys: list[str]) -> bytes:
    return _COUNT.pack(len(keys)) + b"".join(_text(key) for key in keys)
