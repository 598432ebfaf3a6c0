"""Measures the network to another node: do connections open, their round trip and bandwidth.

`ProbeServer` answers at two ports of each node: where agents would listen, and where gloo would.
`measure_reach` and `measure_speed` ask the servers of another node. Everything has a limit; a
failure is a word of `network_rules`, or the text of the system's error.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

from elastane.doctor.facts import connection_outcome, resolved
from elastane.doctor.network_rules import CONNECTED, STRANGER, NodePage, Reach, Speed
from elastane.doctor.serving import ConnectionServer, receive_exactly
from elastane.process.endpoint import bound

CONNECT_LIMIT_S = 3.0
# For each answer of a server. A transfer of the other pair of nodes may use the same link.
ANSWER_LIMIT_S = 10.0
PINGS = 20
# A transfer ends after this time or this size: enough for a TCP connection to reach its speed.
TRANSFER_S = 0.5
TRANSFER_BYTES_MAX = 256 << 20
_PIECE = bytes(1 << 20)
_BACKLOG = 128
# A request is a letter and the number of the node that asks.
_REQUEST, _CLOCK, _COUNT = struct.Struct("!cH"), struct.Struct("!d"), struct.Struct("!Q")
_IDENTIFY, _PING, _TAKE, _GIVE = b"i", b"p", b"t", b"g"


class ProbeServer:
    """Answers the probes of other nodes until closed. `key` tells this node from any other."""

    def __init__(self, key: bytes, addresses: tuple[str, ...]) -> None:
        self.key = key
        listeners = [_listening(address) for address in addresses]
        self.ports = [sock.getsockname()[1] for sock in listeners]
        self._server = ConnectionServer(listeners, self._serve)
        self._served = threading.Condition()
        self._given_to: set[int] = set()

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """Stop accepting; connections end with their transfers."""
        self._server.close()

    def wait_given(self, number: int, limit_s: float) -> None:
        """Wait until the node of this number has made its transfers, or the limit."""
        with self._served:
            self._served.wait_for(lambda: number in self._given_to, limit_s)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error):
            sock.settimeout(ANSWER_LIMIT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                letter, number = _REQUEST.unpack(receive_exactly(sock, _REQUEST.size))
                self._answer(sock, letter, number)

    def _answer(self, sock: socket.socket, letter: bytes, number: int) -> None:
        if letter == _IDENTIFY:
            sock.sendall(self.key)
        elif letter == _PING:
            sock.sendall(_CLOCK.pack(time.time()))
        elif letter == _TAKE:
            sock.sendall(_COUNT.pack(_take(sock)))
        elif letter == _GIVE:
            _give(sock)
            with self._served:
                self._given_to.add(number)
                self._served.notify_all()
        else:
            raise OSError("not a request of elastane doctor")


def measure_reach(page: NodePage, key: bytes, here: int, to: int) -> Reach:
    """Return the result of connections to the node of number `to`, which has `key`."""
    latency_s = offset_s = 0.0
    outcome, gloo = _outcome(page.address, page.probe_port, key, here), CONNECTED
    if outcome == CONNECTED:
        try:
            latency_s, offset_s = _ping(page.address, page.probe_port, here)
        except OSError as error:
            outcome = connection_outcome(error)
        if page.gloo.port:
            gloo = _outcome(page.gloo.address, page.gloo.port, key, here)
    return Reach(
        to=to,
        outcome=outcome,
        gloo=gloo,
        latency_s=latency_s,
        offset_s=offset_s,
        name=resolved(page.name),
    )


def measure_speed(page: NodePage, here: int, to: int) -> Speed | None:
    """Return how fast bytes go to a node and come from it; None if the connection breaks."""
    with contextlib.suppress(OSError), _asked(page.address, page.probe_port) as sock:
        sock.sendall(_REQUEST.pack(_TAKE, here))
        begun_s = time.monotonic()
        _give(sock)
        (taken,) = _COUNT.unpack(receive_exactly(sock, _COUNT.size))
        sent = taken / (time.monotonic() - begun_s)
        sock.sendall(_REQUEST.pack(_GIVE, here))
        begun_s = time.monotonic()
        received = _take(sock) / (time.monotonic() - begun_s)
        return Speed(to=to, sent=round(sent), received=round(received))
    return None


def _listening(address: str) -> socket.socket:
    sock = bound(address, 0)
    sock.listen(_BACKLOG)
    return sock


def _outcome(address: str, port: int, key: bytes, here: int) -> str:
    try:
        with _asked(address, port) as sock:
            sock.sendall(_REQUEST.pack(_IDENTIFY, here))
            return CONNECTED if receive_exactly(sock, len(key)) == key else STRANGER
    except OSError as error:
        return connection_outcome(error)


@contextlib.contextmanager
def _asked(address: str, port: int) -> Iterator[socket.socket]:
    with socket.create_connection((address, port), CONNECT_LIMIT_S) as sock:
        sock.settimeout(ANSWER_LIMIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def _ping(address: str, port: int, here: int) -> tuple[float, float]:
    """Return the shortest round trip, and how far the other clock was ahead then."""
    best: tuple[float, float] | None = None
    with _asked(address, port) as sock:
        for _ in range(PINGS):
            begun_s, clock_s = time.monotonic(), time.time()
            sock.sendall(_REQUEST.pack(_PING, here))
            (theirs_s,) = _CLOCK.unpack(receive_exactly(sock, _CLOCK.size))
            took_s = time.monotonic() - begun_s
            found = (took_s, theirs_s - clock_s - took_s / 2)
            best = found if best is None else min(best, found)
    assert best is not None
    return best


def _give(sock: socket.socket) -> None:
    """Send pieces for TRANSFER_S, each after its size, and a last one of size 0."""
    until_s, sent = time.monotonic() + TRANSFER_S, 0
    while time.monotonic() < until_s and sent < TRANSFER_BYTES_MAX:
        sock.sendall(_COUNT.pack(len(_PIECE)))
        sock.sendall(_PIECE)
        sent += len(_PIECE)
    sock.sendall(_COUNT.pack(0))


def _take(sock: socket.socket) -> int:
    """Receive what `_give` sends; return the number of its bytes."""
    taken, buffer = 0, bytearray(len(_PIECE))
    while taken <= TRANSFER_BYTES_MAX:
        (size,) = _COUNT.unpack(receive_exactly(sock, _COUNT.size))
        if size == 0:
            return taken
        if size > len(_PIECE):
            break
        left = memoryview(buffer)[:size]
        while left:
            got = sock.recv_into(left)
            if not got:
                raise ConnectionResetError("the other side ended the transfer")
            left = left[got:]
        taken += size
    raise OSError("more bytes than a transfer has")
