"""Sends garbage to all listening ports of its host, until it is killed.

    garbage.py SEED MAGIC

MAGIC is the first bytes of each handshake of elastane, in hexadecimal digits. The program sends
random bytes, cut and overlong handshakes, requests of other protocols, and nothing at all. It
closes or resets its connections, or leaves them open for a while. It reads the ports from /proc, so
it finds those of workers too.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

LISTENS = "0A"
PAUSE_S = 0.02
# Connections that stay open; the oldest of them is reset.
OPEN_MAX = 64


def ports() -> Iterator[tuple[str, int]]:
    """Yield the addresses and ports at which this host listens."""
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with open(path, encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == LISTENS:
                    address, port = words[1].split(":")
                    yield _address(address, family), int(port, 16)


def _address(digits: str, family: int) -> str:
    # Each 32 bits are in the order of this machine.
    raw = bytes.fromhex(digits)
    fours = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
    address = socket.inet_ntop(family, b"".join(fours))
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def content(draw: random.Random, magic: bytes) -> bytes:
    """Return what one connection sends."""
    some = draw.randbytes(draw.choice((0, 1, 3, 8, 40, 200, 5000)))
    job = b"job"
    return draw.choice(
        (
            some,
            magic + some,
            magic + struct.pack(">HH", 1, 0xFFFF) + some,
            magic + struct.pack(">HH", 1, len(job)) + draw.randbytes(32) + job + some,
            struct.pack(">I", 0xFFFFFFFF) + some,
            b"GET /healthz HTTP/1.1\r\nContent-Length: 99999999999\r\n" + some,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + some,
            bytes(64),
        )
    )


def reset(connection: socket.socket) -> None:
    """Close a connection as a host does that has forgotten it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def send(draw: random.Random, magic: bytes, kept: deque[socket.socket]) -> None:
    """Send something to one of the ports."""
    found = [*ports()]
    if not found:
        return
    address, port = draw.choice(found)
    connection = socket.create_connection((address, port), 1.0)
    connection.setblocking(False)
    connection.send(content(draw, magic) or b"\n")
    end = draw.choice(
        (connection.close, lambda: reset(connection), lambda: kept.append(connection))
    )
    end()
    if len(kept) > OPEN_MAX:
        reset(kept.popleft())


if __name__ == "__main__":
    drawn = random.Random(int(sys.argv[1]))
    opened: deque[socket.socket] = deque()
    while True:
        with contextlib.suppress(OSError):  # The port is gone, or its process is stopped.
            send(drawn, bytes.fromhex(sys.argv[2]), opened)
        time.sleep(PAUSE_S)
