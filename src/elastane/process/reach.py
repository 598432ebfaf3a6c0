"""Whether addresses lead to the hosts that they are given for.

`answers` tries another host, while a node is left out: a refusal is an answer, since it comes from
that host, and nothing has to listen there. `doubts_of` looks at the address that a user gave for
this host. Nothing is sent to anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress

from elastane.errors import MembershipError
from elastane.process.endpoint import is_mine
from elastane.process.resolver import resolve
from elastane.process.unanswered import own_addresses
from elastane.protocol.limits import PROBE_TIMEOUT_S

# Between two look-ups of a name that is not known.
_LOOKUP_PAUSES_S = (1.0, 2.0, 2.0)
# More addresses would not help a person.
_OWN_NAMED = 4


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


async def doubts_of(local_addr: str) -> str:
    """Return why others may not find this node at the address that the user gave; "" if they may.

    A name may be known only some seconds after a pod has started, so it is looked up again.
    """
    for pause_s in (*_LOOKUP_PAUSES_S, 0.0):
        found, why = await _lookup(local_addr)
        if found or not pause_s:
            break
        await asyncio.sleep(pause_s)
    advice = "give an address of this host that the other nodes reach, or leave the option out"
    if not found:
        return f"--local-addr {local_addr}: no address is known for it here ({why}); next: {advice}"
    if is_mine(found):
        return ""
    own = ", ".join(own_addresses()[:_OWN_NAMED]) or "none is known"
    return (
        f"--local-addr {local_addr} is {', '.join(found[:_OWN_NAMED])}, and no address of"
        f" this host ({own}); unless a NAT or a Service leads here, {advice}"
    )


async def _lookup(host: str) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a host, or none and why."""
    try:
        return await resolve(host), ""
    except MembershipError as error:
        return (), error.what.rpartition(": ")[2]
