"""Finds which of this process's sockets belong to one gloo group, and cuts them.

gloo 2.13 has no abort: a blocked collective returns only after shutdown(2) on the connections of
its context. Connections are identified by address: one belongs to the group if its local end is the
listener that this rank published, or its far end is one that a peer published. Once a group is
built its connections are known by inode, which no other socket can have. Listeners are never
touched: a shut listener makes gloo's event loop throw and ends the process.

It knows the layout of what gloo publishes (a private format; `parse_entry` returns None for any
other), and nothing of stores, ranks or threads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

# Address bytes and port, both as they are on the wire: (family, port, address).
Endpoint: TypeAlias = tuple[int, int, bytes]

_ADDRESS_BYTES = 136  # sockaddr_storage (128) and the pair's number (8)
_SYN_SENT = "02"  # as written in /proc/net/tcp
_LENGTH = struct.Struct("=Q")
_PAIR = struct.Struct("=q")
# In struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received (Linux 4.1).
_TCP_BYTES = struct.Struct("=QQ")
_TCP_BYTES_AT = 120
_TCP_INFO_BYTES = _TCP_BYTES_AT + _TCP_BYTES.size


@dataclass(frozen=True)
class SocketEntry:
    """What one rank publishes: where it listens, and the number of each peer's pair there."""

    listener: Endpoint
    pairs: tuple[int, ...]


def parse_entry(blob: bytes) -> SocketEntry | None:
    """Parse what gloo puts into the store for one rank; None for another layout."""
    try:
        (host_bytes,) = _LENGTH.unpack_from(blob, 0)
        at = _LENGTH.size + host_bytes
        (address_bytes,) = _LENGTH.unpack_from(blob, at)
        at += _LENGTH.size
        rest = len(blob) - at - _ADDRESS_BYTES
        if address_bytes != _ADDRESS_BYTES or rest < 0 or rest % _PAIR.size:
            return None
        listener = _sockaddr(blob[at : at + _ADDRESS_BYTES])
        pairs = tuple(pair for (pair,) in _PAIR.iter_unpack(blob[len(blob) - rest :]))
    except struct.error:
        return None
    return None if listener is None else SocketEntry(listener, pairs)


def _sockaddr(raw: bytes) -> Endpoint | None:
    (family,) = struct.unpack_from("=H", raw, 0)
    (port,) = struct.unpack_from("!H", raw, 2)
    if family == socket.AF_INET:
        return family, port, raw[4:8]
    if family == socket.AF_INET6:
        return family, port, raw[8:24]
    return None


def belongs_to(own: Endpoint | None, peers: set[Endpoint]) -> Callable[[socket.socket], bool]:
    """Return a test for connections between the listener `own` and those of `peers`."""

    def belongs(sock: socket.socket) -> bool:
        if _endpoint(sock.family, sock.getpeername()) in peers:
            return True
        return own is not None and _endpoint(sock.family, sock.getsockname()) == own

    return belongs


def _endpoint(family: int, name: tuple[str, int]) -> Endpoint:
    host, port = name[0].partition("%")[0], name[1]
    return family, port, socket.inet_pton(family, host)


def inodes(belongs: Callable[[socket.socket], bool]) -> set[int]:
    """Return the inodes of this process's connected TCP sockets that pass the test."""
    found = set()
    for fd, inode in _sockets():
        with _duplicated(fd, inode) as sock:
            if sock is not None and _passes(sock, belongs):
                found.add(inode)
    return found


def connecting(peers: set[Endpoint]) -> set[int]:
    """Return the inodes of sockets that try to reach `peers`, whose far end cannot be queried.

    They may be of any process of this network namespace; `cut` touches only those of this one.
    """
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), Path(f"/proc/self/net/{name}").open() as table:
            for line in list(table)[1:]:
                fields = line.split()
                address, _, port = fields[2].partition(":")
                words = struct.iter_unpack("!I", bytes.fromhex(address))
                raw = b"".join(struct.pack("=I", word) for (word,) in words)
                if fields[3] == _SYN_SENT and (family, int(port, 16), raw) in peers:
                    found.add(int(fields[9]))
    return found


def cut(chosen: set[int]) -> int:
    """Shut the read side of the sockets with these inodes; return their number.

    Only the read side: with the write side shut, a racing send gets EPIPE, and gloo then waits for
    a buffer that is never signalled.
    """
    count = 0
    for fd, inode in _sockets():
        if inode in chosen:
            with _duplicated(fd, inode) as sock:
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RD)
                    count += 1
    return count


def traffic(chosen: set[int]) -> int:
    """Return the bytes that these sockets have received, or sent with an acknowledgement."""
    count = 0
    for fd, inode in _sockets():
        if inode in chosen:
            with _duplicated(fd, inode) as sock, contextlib.suppress(OSError):
                if sock is not None:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    count += sum(_TCP_BYTES.unpack_from(info, _TCP_BYTES_AT))
    return count


def _sockets() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each of 10,000 is slow
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:["):
                yield int(name), int(target[8:-1])


@contextlib.contextmanager
def _duplicated(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of `fd` if it still is that socket: a reused number is never cut."""
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with sock:
        same = os.fstat(sock.fileno()).st_ino == inode
        tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield sock if same and tcp else None


def _passes(sock: socket.socket, belongs: Callable[[socket.socket], bool]) -> bool:
    try:
        return belongs(sock)
    except OSError:
        return False  # not connected: a listener, or an attempt that is not complete


def knock(entry: SocketEntry, timeout_s: float) -> None:
    """Connect to this rank's own listener in every peer's name.

    A rank waits for peers to connect to it, and for a dead peer there is no socket to cut. Its own
    connections, closed at once, end that wait.
    """
    family, port, address = entry.listener
    where = (socket.inet_ntop(family, address), port)
    for pair in entry.pairs:
        with contextlib.suppress(OSError), socket.create_connection(where, timeout_s) as sock:
            sock.sendall(_PAIR.pack(pair))
