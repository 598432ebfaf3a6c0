"""The address at which other nodes reach this node's snapshot server, and warnings about replicas.

A node's own address is the one by which it reaches node rank 0, which all nodes reach. That of node
rank 0 is MASTER_ADDR. `--local-addr` overrides both.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from functools import lru_cache

from elastane.checkpoint.shares import RankStatus
from elastane.process import environment
from elastane.snapshots.client import SnapshotClient


def door_of(keeper: SnapshotClient) -> str:
    """Return where a snapshot server accepts replicas, as HOST:PORT; "" if it does not."""
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
            # Nothing is sent: connecting a UDP socket asks the kernel for its route.
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _bracketed(str(probe.getsockname()[0]))
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def without_copies(members: Sequence[RankStatus]) -> str:
    """Return a warning about nodes whose part of the state is on no other node, or ""."""
    doors = {member.keeper: bool(member.door) for member in members}
    if not any(doors.values()):
        return ""  # Replication is off.
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
