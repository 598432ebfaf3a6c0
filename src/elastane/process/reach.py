"""Whether another host answers a TCP connection: an agent asks while a node is left out.

A refusal is an answer, since it comes from that host: nothing has to listen there. The connection
is closed at once, and nothing is sent over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress

from elastane.protocol.limits import PROBE_TIMEOUT_S


async def answers(address: str, port: int, limit_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return whether the host at this address of IPv4 or IPv6 answers within `limit_s`.

    False also for a name: another host chose it, and a lookup takes its own time.
    """
    try:
        ipaddress.ip_address(address)
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
