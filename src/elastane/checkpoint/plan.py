"""The plan of saves: which rank keeps which part of a state, and the messages of each save.

`shares` is pure and equal on all ranks. Ranks with the same snapshot server share a node; servers
with the same place share a folder. All servers of one place write one checkpoint together; each
place has its own. A `SavePlan` is made once, and again when the tensors or the ranks change. Small
files that change seldom are sent to the snapshot server once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
import xxhash

from elastane.checkpoint.capture import Captured, SmallState
from elastane.checkpoint.copying import CopySources, PreparedSlot
from elastane.checkpoint.layout import Layout
from elastane.checkpoint.small_files import (
    LAYOUT,
    METADATA,
    PLAIN,
    STATE,
    ByteRange,
    PlainLeaves,
    StoredFiles,
    encoded,
    metadata,
)
from elastane.checkpoint.state_source import SavingWorld
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.messages import PersistRequest, Replica, Snapshot
from elastane.version import __version__

SLOTS = 3
# Replication pins two snapshots for a while: see `snapshots.rules`.
SLOTS_WITH_COPIES = 4
# How long the writers of one checkpoint wait for each other.
TOGETHER_S = 600.0


class SaveOrder(msgspec.Struct, frozen=True):
    """A requested save: `reason` is step, time, asked or leave."""

    step: int
    reason: str
    keep: int
    job: str


class SaveDetails(msgspec.Struct, frozen=True):
    """The agreed details of one save. `durable`: it is to be written to storage.

    `copied`: other nodes are to hold replicas of it. `safe` is the last save that all nodes have
    replicated, `together` the last that all ranks have kept; "" if there is none yet. The save
    began at `began_s` of the monotonic clock.
    """

    nonce: str
    began_s: float
    durable: bool
    copied: bool = False
    safe: str = ""
    together: str = ""


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    """The situation of one rank. `survives`: its snapshot server outlives it.

    `replica_address` is where that server accepts replicas for the workers of `group`, as
    HOST:PORT; "" if it does not.
    """

    server: str
    survives: bool
    place: str
    replica_address: str = ""
    group: str = ""


class SaveShare(msgspec.Struct, frozen=True):
    """One rank's share: it copies [first, end) into its slot, and its server writes `ranges`.

    `local` of `locals` ranks fill the slots of their node. `part` of `parts` servers write the
    checkpoint, which consists of `all_ranges`; `places` is the number of checkpoints of one save.
    A sharded part is replicated to the server at `replica_address`; "" without replication.
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
    replica_address: str = ""
    group: str = ""


def shares(layout: Layout, members: Sequence[RankStatus]) -> list[SaveShare]:
    """Return what each rank copies and what its server writes, in the order of the ranks."""
    places: dict[str, dict[str, list[int]]] = {}
    for rank, member in enumerate(members):
        places.setdefault(member.place, {}).setdefault(member.server, []).append(rank)
    found: dict[int, SaveShare] = {}
    for servers in places.values():
        found |= _of_place(layout, [*servers.values()], members)
    count = len(places)
    peers = {} if layout.replicated else ring(members)
    return [
        msgspec.structs.replace(
            found[rank],
            places=count,
            replica_address=peers[member.server].replica_address if member.server in peers else "",
            group=peers[member.server].group if member.server in peers else "",
        )
        for rank, member in enumerate(members)
    ]


def ring(members: Sequence[RankStatus]) -> dict[str, RankStatus]:
    """Return the peer of each server: the next one that accepts replicas, in a ring."""
    by_server = {member.server: member for member in members if member.replica_address}
    listeners = [*by_server.values()]
    if len(listeners) < 2:
        return {}
    nexts = zip(listeners, [*listeners[1:], listeners[0]], strict=True)
    return {own.server: peer for own, peer in nexts}


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
    # A server that dies with its workers needs only the part that it writes.
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


class SavePlan:
    """One rank's plan for a layout and a set of ranks. `captured` is the first state of it."""

    def __init__(
        self,
        server: SnapshotClient,
        where: str,
        layout: Layout,
        share: SaveShare,
        captured: Captured,
        world: SavingWorld,
    ) -> None:
        self._server = server
        self._where = where
        self.layout = layout
        self.share = share
        pieces = layout.within(share.first, share.end)
        self.sources = CopySources(pieces, captured, world.optimizers())
        self._world = world.members().size
        slots = SLOTS_WITH_COPIES if share.replica_address else SLOTS
        fds = server.slots(slots, max(1, share.end - share.first))
        self._slots = [PreparedSlot(fd, layout, share.first, share.end) for fd in fds]
        self._plain = PlainLeaves()
        self._index: tuple[tuple[int, ...], str] | None = None
        self._layout = encoded(layout)

    def slot(self, number: int) -> PreparedSlot:
        """Return the slot that the snapshot server has granted."""
        return self._slots[number]

    def snapshot(
        self,
        small: SmallState | None,
        streams: bytes,
        key: Key,
        order: SaveOrder,
        details: SaveDetails,
    ) -> Snapshot:
        """Return the message of a save; `small` is given on the first rank of each node."""
        share = self.share
        files, digest = self._small_files(small, key.step, order) if small else ({}, "")
        return Snapshot(
            key=key,
            nonce=details.nonce,
            took_s=max(0.0, time.monotonic() - details.began_s),
            local=share.local,
            locals=share.locals,
            first=share.first,
            end=share.end,
            image_bytes=self.layout.image_bytes,
            files=files,
            layout=digest,
            streams=streams,
            replicated=self.layout.replicated,
            together=details.together,
            persist=self._persist(order) if details.durable else None,
            replica=self._replica(details),
        )

    def _replica(self, details: SaveDetails) -> Replica | None:
        share = self.share
        if not share.replica_address:
            return None
        return Replica(share.replica_address if details.copied else "", share.group, details.safe)

    def _small_files(
        self, small: SmallState, step: int, order: SaveOrder
    ) -> tuple[dict[str, bytes], str]:
        """Return the files that change with each save, and the digest of the others."""
        written = self._plain.written(small.leaves)
        stored = StoredFiles(small.tree(), self.share.all_ranges, step, self._world)
        files = {STATE: encoded(stored), PLAIN: b"".join(written.values())}
        sizes = tuple(map(len, written.values()))
        if self._index is None or self._index[0] != sizes:
            index = metadata(self.layout, [*self.share.all_ranges], written, small.paths)
            seldom = {LAYOUT: self._layout, METADATA: index}
            digest = xxhash.xxh3_128_hexdigest(b"".join(seldom.values()))
            self._server.layout(digest, seldom, self._final_flush(order))
            self._index = sizes, digest
        return files, self._index[1]

    def _final_flush(self, order: SaveOrder) -> PersistRequest:
        """Return what the server writes after its workers are gone: everything it holds."""
        persist = self._persist(order)
        if not self.layout.replicated:
            return persist
        ranges = self.share.all_ranges
        return msgspec.structs.replace(persist, part=0, parts=1, ranges=ranges, small=True)

    def _persist(self, order: SaveOrder) -> PersistRequest:
        share = self.share
        return PersistRequest(
            where=self._where,
            job=order.job,
            world=self._world,
            versions={"elastane": __version__, "torch": str(torch.__version__)},
            reason=order.reason,
            part=share.part,
            parts=share.parts,
            ranges=share.ranges,
            small=share.part == 0,
            keep=order.keep,
            wait_s=TOGETHER_S,
        )
