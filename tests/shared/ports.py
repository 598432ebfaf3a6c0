"""Free ports for servers that a test starts."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 31_000


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different free ports, outside the range from which the kernel chooses ports.

    Any connection on this host may take a free port of that range before the server does.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
