"""Which rank keeps, and which server writes, which part of a state: pure, equal on all ranks.

Ranks with the same snapshot server share a node; servers with the same place share a folder. All
servers of one place write one checkpoint together; each place has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from elastane.checkpoint.dcp import ByteRange
from elastane.checkpoint.layout import Layout


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    """The situation of one rank. `survives`: its snapshot server outlives it.

    `door` is where that server accepts replicas for the workers of `group`; "" if it does not.
    """

    keeper: str
    survives: bool
    place: str
    door: str = ""
    group: str = ""


class SaveShare(msgspec.Struct, frozen=True):
    """One rank's share: it copies [first, end) into its slot, and its server writes `ranges`.

    `local` of `locals` ranks fill the slots of their node. `part` of `parts` servers write the
    checkpoint, which consists of `all_ranges`; `places` is the number of checkpoints of one save.
    A sharded part is replicated to the server at `door`; "" without replication.
    """

    local: int
    locals: int
    first: int
    end: int
    part: int
    parts: int
    ranges: tuple[ByteRange, ...]
    all_ranges: tuple[ByteRange, ...]
    places: int = 1
    door: str = ""
    group: str = ""


def shares(layout: Layout, members: Sequence[RankStatus]) -> list[SaveShare]:
    """Return each rank's share."""
    places: dict[str, dict[str, list[int]]] = {}
    for rank, member in enumerate(members):
        places.setdefault(member.place, {}).setdefault(member.keeper, []).append(rank)
    found: dict[int, SaveShare] = {}
    for keepers in places.values():
        found |= _of_place(layout, [*keepers.values()], members)
    count = len(places)
    peers = {} if layout.replicated else ring(members)
    return [
        msgspec.structs.replace(
            found[rank],
            places=count,
            door=peers[member.keeper].door if member.keeper in peers else "",
            group=peers[member.keeper].group if member.keeper in peers else "",
        )
        for rank, member in enumerate(members)
    ]


def ring(members: Sequence[RankStatus]) -> dict[str, RankStatus]:
    """Return the peer of each server: the next one that accepts replicas, in a ring."""
    doors = list({member.keeper: member for member in members if member.door}.values())
    if len(doors) < 2:
        return {}
    nexts = zip(doors, [*doors[1:], doors[0]], strict=True)
    return {own.keeper: peer for own, peer in nexts}


def _of_place(
    layout: Layout, nodes: list[list[int]], members: Sequence[RankStatus]
) -> dict[int, SaveShare]:
    if layout.replicated:
        cuts = layout.cut(len(nodes), 0, layout.image_bytes)
        written = [[(cuts[n], cuts[n + 1])] for n in range(len(nodes))]
    else:
        bounds = layout.bounds
        written = [_joined([(bounds[rank], bounds[rank + 1]) for rank in node]) for node in nodes]
    named = [_named(node, spans) for node, spans in enumerate(written)]
    everything = tuple(each for ranges in named for each in ranges)
    found = {}
    for part, node in enumerate(nodes):
        kept = _kept(layout, node, written[part], members)
        for local, rank in enumerate(node):
            found[rank] = SaveShare(
                *(local, len(node), *kept[local]), part, len(nodes), named[part], everything
            )
    return found


def _kept(
    layout: Layout,
    node: list[int],
    written: list[tuple[int, int]],
    members: Sequence[RankStatus],
) -> list[tuple[int, int]]:
    """Return the range that each rank of a node copies into its slot."""
    if not layout.replicated:
        return [(layout.bounds[rank], layout.bounds[rank + 1]) for rank in node]
    # A server that dies with its workers only needs what it writes.
    first, end = (0, layout.image_bytes) if members[node[0]].survives else written[0]
    return [*pairwise(layout.cut(len(node), first, end))]


def _named(node: int, spans: Sequence[tuple[int, int]]) -> tuple[ByteRange, ...]:
    """Return the files of one server, named as by torch.distributed.checkpoint."""
    full = [span for span in spans if span[0] < span[1]]
    return tuple(ByteRange(f"__{node}_{n}.distcp", *span) for n, span in enumerate(full))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return found
