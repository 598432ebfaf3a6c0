"""Where the keepers of other nodes find this node's, and what is told where copies cannot go there.

A node's own address is the one by which it reaches node rank 0, which all nodes reach; that one's
is MASTER_ADDR itself. `--local-addr` overrides both.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from functools import lru_cache

from elastane.checkpoint.shares import RankStatus
from elastane.process import environment
from elastane.snapshots.client import Keeper


def door_of(keeper: Keeper) -> str:
    """Return where a keeper takes copies, as HOST:PORT; "" where it does not."""
    host, _, port = keeper.door.rpartition(":")
    if not port:
        return ""
    host = host or _own_host(environment.get("MASTER_ADDR"), environment.get("GROUP_RANK"))
    return f"{host}:{port}" if host else ""


@lru_cache(maxsize=8)
def _own_host(master: str, node_rank: str) -> str:
    if not master or node_rank == "0":
        return _bracketed(master or "127.0.0.1")
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            master, 9, type=socket.SOCK_DGRAM
        ):
            # Nothing is sent: it is the kernel that is asked for its way there.
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _bracketed(str(probe.getsockname()[0]))
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def without_copies(members: Sequence[RankStatus]) -> str:
    """Return what the user is to know of nodes whose part of the state is on no other; or ""."""
    doors = {member.keeper: bool(member.door) for member in members}
    if not any(doors.values()):
        return ""  # Nobody asked for it.
    slug = "snapshot-replicas"
    if len(doors) == 1:
        return (
            "--snapshot-replicas: all workers are on one node, and there is no other to hold copies"
            f" of snapshots [{slug}]"
        )
    if not all(doors.values()):
        count = sum(not there for there in doors.values())
        return (
            f"--snapshot-replicas: {count} of {len(doors)} nodes have none, and what only they hold"
            f" is lost with them; give all nodes the same options [{slug}]"
        )
    return ""
