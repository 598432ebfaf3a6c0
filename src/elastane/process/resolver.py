"""Resolves the name of a host, with a timeout.

It fails with MembershipError for a name that does not resolve, or not in time.
"""

from __future__ import annotations

import socket

from elastane.errors import MembershipError
from elastane.process.offload import Offload

# One look-up of a name; the resolver's default is 5 s per server and two tries.
RESOLVE_TIMEOUT_S = 10.0

_offload = Offload()


async def resolve(host: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> tuple[str, ...]:
    """Return the addresses of `host`, in the resolver's order; tries once.

    Raises MembershipError after at most `timeout_s`, with the next step.
    """

    def look_up() -> tuple[str, ...]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    try:
        return await _offload.run(look_up, timeout_s)
    except TimeoutError as error:
        raise _unresolvable(host, f"no answer within {timeout_s:g} s") from error
    except (OSError, UnicodeError) as error:
        raise _unresolvable(host, getattr(error, "strerror", "") or str(error)) from error


def _unresolvable(host: str, why: str) -> MembershipError:
    return MembershipError(
        f"endpoint: host {host!r} does not resolve on this node: {why}",
        slug="endpoint-unresolvable",
        expected="a name that DNS or /etc/hosts of every node knows, or an address",
        next_step=f"getent hosts {host}",
    )
