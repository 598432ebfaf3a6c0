"""Which of this process's sockets belong to one gloo group, and how they are cut.

gloo 2.13 has no abort: what brings a blocked collective out is shutdown(2) on the connections of
its context. They are told from everybody else's by address: a connection is the group's if its
local end is the listener that this rank published, or its far end is one that a peer published.
Once a group is built they are known by inode, which no other socket can have. Only connections
are ever touched: a shut listener makes gloo's event loop throw and ends the process.

Knows the layout of what gloo publishes (a private format; `parse_entry` answers None for any
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
_SYN_SENT = "02"  # as /proc/net/tcp has it
_LENGTH = struct.Struct("=Q")
_PAIR = struct.Struct("=q")
# In struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received (Linux 4.1).
_TCP_BYTES = struct.Struct("=QQ")
_TCP_BYTES_AT = 120
_TCP_INFO_BYTES = _TCP_BYTES_AT + _TCP_BYTES.size


@dataclass(frozen=True)
class SocketEntry:
    """What one rank publishes: where it listens, and the number each peer's pair has there."""

    listener: Endpoint
    pairs: tuple[int, ...]


def parse_entry(blob: bytes) -> SocketEntry | None:
    """Read what gloo puts into the store for one rank; None where it is of another layout."""
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
    """A test for connections between the listener `own` and those of `peers`."""

    def belongs(sock: socket.socket) -> bool:
        if _endpoint(sock.family, sock.getpeername()) in peers:
            return True
        return own is not None and _endpoint(sock.family, sock.getsockname()) == own

    return belongs


def _endpoint(family: int, name: tuple[str, int]) -> Endpoint:
    host, port = name[0].partition("%")[0], name[1]
    return family, port, socket.inet_pton(family, host)


def inodes(belongs: Callable[[socket.socket], bool]) -> set[int]:
    """The inodes of this process's connected TCP sockets that pass the test."""
    found = set()
    for fd, inode in _sockets():
        with _looked_at(fd, inode) as sock:
            if sock is not None and _passes(sock, belongs):
                found.add(inode)
    return found


def connecting(peers: set[Endpoint]) -> set[int]:
    """The inodes of sockets that are trying to reach `peers`: these have no far end to ask for.

    Of all processes of this network namespace; `cut` touches those of this process.
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
    """Shut the read side of the sockets with these inodes; how many there were.

    The read side only: with the write side shut, a send that races gets EPIPE, and gloo then
    waits for a buffer that nobody will ever signal.
    """
    count = 0
    for fd, inode in _sockets():
        if inode in chosen:
            with _looked_at(fd, inode) as sock:
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RD)
                    count += 1
    return count


def traffic(chosen: set[int]) -> int:
    """Return the bytes that the sockets with these inodes have received, and had acknowledged."""
    count = 0
    for fd, inode in _sockets():
        if inode in chosen:
            with _looked_at(fd, inode) as sock, contextlib.suppress(OSError):
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
def _looked_at(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """A duplicate of `fd` while it still is that socket, so that a reused number is never hit."""
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
        return False  # not connected: a listener, or an attempt that has not come through


def knock(entry: SocketEntry, timeout_s: float) -> None:
    """Come to one's own listener in every peer's name.

    A rank waits for the peers that connect to it, and for one that died there is no socket to
    cut. Connections of our own, closed at once, end that wait.
    """
    family, port, address = entry.listener
    where = (socket.inet_ntop(family, address), port)
    for pair in entry.pairs:
        with contextlib.suppress(OSError), socket.create_connection(where, timeout_s) as sock:
            sock.sendall(_PAIR.pack(pair))
