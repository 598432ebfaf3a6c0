"""Which addresses do not answer the TCP connections of some processes, and which are our own.

Both are read from the kernel's tables; Linux only, and elsewhere nothing is found. A connection
counts if its last packets were sent again several times without an acknowledgement, or its first
packet was. That is so where a host is cut off, also if only one direction is. A process that reads
slowly acknowledges, so it does not count.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from elastane.protocol.limits import ADDRESSES_MAX, UNANSWERED_MAX

# States and the timer of retransmission, as written in /proc/net/tcp.
_ESTABLISHED, _SYN_SENT = "01", "02"
_RETRANSMITS = "01:"
# Packets are sent again after 0.2 s or more, each time after twice as long: the fifth after 6 s. A
# connection's first packet is sent again after 1 s, and a host without a route refuses after 3 s.
_SENT_AGAIN_MIN = {_ESTABLISHED: 5, _SYN_SENT: 1}
_LOOK_S = 1.0
# The scope of addresses of IPv6 beyond one link, as written in /proc/net/if_inet6.
_GLOBAL = "00"
# An attempt to connect that failed is made again: between two there may be none.
_KEPT_S = 5.0


class UnansweredWatch:
    """Looks at the tables about once a second, and keeps what it found for some seconds."""

    def __init__(self) -> None:
        self._looked_s = float("-inf")
        self._seen_s: dict[str, float] = {}
        self.addresses: tuple[str, ...] = ()

    def look(self, pids: Iterable[int], now_s: float) -> None:
        """Look at the connections of these processes, which are in one network namespace."""
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        self._seen_s |= dict.fromkeys(unanswered(pids), now_s)
        self._seen_s = {at: s for at, s in self._seen_s.items() if now_s - s <= _KEPT_S}
        self.addresses = tuple(sorted(self._seen_s)[:UNANSWERED_MAX])

    def forget(self) -> None:
        """Forget what was found: other connections come next."""
        self._seen_s, self.addresses = {}, ()


def unanswered(pids: Iterable[int]) -> set[str]:
    """Return the addresses that do not answer these processes."""
    numbers = [*pids]
    if not numbers:
        return set()
    found = _waiting(numbers[0])
    owned = _sockets(numbers) if found else set()
    return {address for inode, address in found.items() if inode in owned}


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of this host, but for those that no other host can connect to."""
    found, last = set[str](), ""
    with contextlib.suppress(OSError), Path("/proc/net/fib_trie").open() as table:
        for line in table:
            words = line.split()
            if words[:1] == ["|--"]:
                last = words[1]
            elif words == ["/32", "host", "LOCAL"] and not last.startswith("127."):
                found.add(last)
    with contextlib.suppress(OSError), Path("/proc/net/if_inet6").open() as table:
        for raw, _, _, scope, *_ in map(str.split, table):
            if scope == _GLOBAL:
                found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw)))
    return tuple(sorted(found)[:ADDRESSES_MAX])


def _waiting(pid: int) -> dict[int, str]:
    """Return the address of each connection that waits for an answer, by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/net/{name}").open() as table:
            next(table, None)
            for line in table:
                fields = line.split()
                least = _SENT_AGAIN_MIN.get(fields[3])
                if least is None or not fields[5].startswith(_RETRANSMITS):
                    continue
                if int(fields[6], 16) >= least:
                    found[int(fields[9])] = _address(fields[2].partition(":")[0])
    return found


def _address(written: str) -> str:
    """Return an address in the usual notation; the table has the words of its bytes in hex."""
    words = struct.iter_unpack("!I", bytes.fromhex(written))
    raw = b"".join(struct.pack("=I", word) for (word,) in words)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw).removeprefix("::ffff:")


def _sockets(pids: Iterable[int]) -> set[int]:
    """Return the inodes of all sockets that these processes have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - a Path for each is slow
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                    if target.startswith("socket:["):
                        found.add(int(target[8:-1]))
    return found
