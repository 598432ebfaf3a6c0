"""A connection between the snapshot servers of two nodes, authenticated by the job's secret.

It uses the handshake and frames of agents and coordinators (`protocol.wire`), inside TLS if the job
has it. Raw memory is sent between frames. Calls block; each wait and the whole connection are
bounded. How it fails: OSError (ConnectionError, TimeoutError) with a reason in words.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from elastane.errors import ElastaneError, WireError
from elastane.process import tls
from elastane.protocol.checkpoints import CHUNK_BYTES
from elastane.protocol.limits import FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, HANDSHAKE_TIMEOUT_S
from elastane.protocol.wire import (
    HEAD_BYTES,
    NONCE_BYTES,
    ClientHandshake,
    FrameCodec,
    ServerHandshake,
)
from elastane.snapshots.limits import CONNECT_S, REPLICA_S, REPLICA_STALL_S
from elastane.snapshots.messages import ReplicationSettings
from elastane.storage import digest

T = TypeVar("T")
_WHY = {
    "wrong-token": "it has another secret",
    "wrong-job": "it is of another job",
    "protocol-version": "it is of another version of elastane",
}


class PeerConnection(Generic[T]):
    """An authenticated connection; incoming frames decode to a `T`."""

    def __init__(self, end: socket.socket, codec: FrameCodec[T, object]) -> None:
        self._end = end
        self._codec = codec
        self._until_s = time.monotonic() + REPLICA_S
        end.settimeout(REPLICA_STALL_S)

    def send(self, message: object) -> None:
        """Send one message."""
        self._end.sendall(self._codec.encode(message))

    def receive(self) -> T:
        """Wait for one message."""
        head = self._exactly(HEAD_BYTES)
        length = int.from_bytes(head[:4], "little")
        if length > FRAME_BYTES_MAX:
            raise ConnectionError(f"it sent a frame of {length} bytes")
        self._codec.feed(head)
        self._codec.feed(self._exactly(length))
        try:
            message = self._codec.next()
        except WireError as error:
            raise ConnectionError(error.what) from error
        assert message is not None, "the whole frame was fed"
        return message

    def send_bytes(self, view: memoryview) -> str:
        """Send memory as it is; returns its digest."""
        return self._transfer(view, self._end.sendall)

    def receive_into(self, view: memoryview) -> str:
        """Fill memory with what the peer sends; returns its digest."""
        return self._transfer(view, self._fill)

    def close(self) -> None:
        """Close it."""
        self._end.close()

    def _transfer(self, view: memoryview, move: Callable[[memoryview], None]) -> str:
        """Move memory chunk by chunk and digest each chunk while it is in the processor's cache.

        The result is the digest of the chunks' digests, as for snapshots elsewhere.
        """
        digests = []
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            move(chunk)
            digests.append(digest.digest_of([chunk]).encode())
            if time.monotonic() > self._until_s:
                raise TimeoutError(f"it took longer than {REPLICA_S:g} s")
        return digest.digest_of(digests)

    def _fill(self, view: memoryview) -> None:
        until_s = time.monotonic() + REPLICA_STALL_S
        done = 0
        while done < len(view):
            if time.monotonic() > until_s:
                raise TimeoutError(f"it sent {done} bytes in {REPLICA_STALL_S:g} s")
            count = self._end.recv_into(view[done:])
            if not count:
                raise ConnectionResetError("the connection ended in the middle")
            done += count

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)


def dial(
    address: str, settings: ReplicationSettings, decoder: msgspec.msgpack.Decoder[T]
) -> PeerConnection[T]:
    """Connect to the snapshot server at `address`, HOST:PORT."""
    host, _, port = address.rpartition(":")
    end = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    handshake = ClientHandshake(settings.job, settings.secrets[0], os.urandom(NONCE_BYTES))
    try:
        until_s = _limited(end)
        config = _tls(settings)
        if config is not None:
            end = tls.client_context(config).wrap_socket(end)
        _shake(end, handshake, until_s)
        return PeerConnection(end, handshake.codec_of(decoder))
    except BaseException:
        end.close()
        raise


def answer(
    end: socket.socket, settings: ReplicationSettings, decoder: msgspec.msgpack.Decoder[T]
) -> PeerConnection[T]:
    """Authenticate a caller; closes `end` if the caller does not know the secret."""
    first, *others = settings.secrets
    handshake = ServerHandshake(settings.job, first, os.urandom(NONCE_BYTES), tuple(others))
    try:
        until_s = _limited(end)
        config = _tls(settings)
        if config is not None:
            end = tls.server_context(config).wrap_socket(end, server_side=True)
        _shake(end, handshake, until_s)
        return PeerConnection(end, handshake.codec_of(decoder))
    except BaseException:
        end.close()
        raise


def _limited(end: socket.socket) -> float:
    """Prepare a socket for its handshake; returns the deadline, TLS included."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.settimeout(HANDSHAKE_TIMEOUT_S)
    return time.monotonic() + HANDSHAKE_TIMEOUT_S


def _shake(
    end: socket.socket, handshake: ClientHandshake | ServerHandshake, until_s: float
) -> None:
    try:
        reply = handshake.start()
        while True:
            end.settimeout(max(0.001, until_s - time.monotonic()))
            if reply:
                end.sendall(reply)
            if handshake.done:
                return
            data = end.recv(HANDSHAKE_BYTES_MAX)
            if not data:
                raise ConnectionResetError("the connection ended before it was authenticated")
            reply = handshake.feed(data)
    except WireError as error:
        if handshake.farewell:
            end.sendall(handshake.farewell)
        why = _WHY.get(error.slug, "it does not speak as a snapshot server of this job")
        raise ConnectionError(why) from error


def _tls(settings: ReplicationSettings) -> tls.TlsConfig | None:
    cert, key, ca = settings.tls
    return tls.TlsConfig(cert=cert, key=key, ca=ca) if cert else None


def reason_of(error: Exception) -> str:
    """Return in words why a connection failed."""
    if isinstance(error, ElastaneError):
        return error.what
    if isinstance(error, TimeoutError):
        return str(error.strerror or error) or "no answer"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
