"""The plan of saves: a layout, this rank's share of it, and the messages of each save.

It is made once, and again when the tensors or the ranks change; slots are mapped and laid out then.
It makes the small files of a save. Those that change seldom are sent to the snapshot server once.
"""

from __future__ import annotations

import msgspec
import torch
import xxhash

import elastane
from elastane.checkpoint.capture import Captured, SmallState
from elastane.checkpoint.dcp import METADATA, PLAIN, PlainLeaves, metadata
from elastane.checkpoint.layout import Layout
from elastane.checkpoint.shares import SaveShare
from elastane.checkpoint.slots import CopySources, Slot
from elastane.checkpoint.state_source import SavingWorld
from elastane.checkpoint.stored import LAYOUT, STATE, StoredFiles, encoded
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.messages import PersistRequest, Replica, Snapshot

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
    replicated, `together` the last that all ranks have kept; "" if there is none yet.
    """

    nonce: str
    durable: bool
    copied: bool = False
    safe: str = ""
    together: str = ""


class SavePlan:
    """One rank's plan for a layout and a set of ranks. `captured` is the first state of it."""

    def __init__(
        self,
        keeper: SnapshotClient,
        where: str,
        layout: Layout,
        share: SaveShare,
        captured: Captured,
        world: SavingWorld,
    ) -> None:
        self._keeper, self._where = keeper, where
        self.layout, self.share = layout, share
        self.sources = CopySources(layout, share, captured, world.optimizers())
        self._world = world.members().size
        slots = SLOTS_WITH_COPIES if share.door else SLOTS
        fds = keeper.slots(slots, max(1, share.end - share.first))
        self._slots = [Slot(fd, layout, share) for fd in fds]
        self._plain = PlainLeaves()
        self._index: tuple[tuple[int, ...], str] | None = None
        self._layout = encoded(layout)

    def slot(self, number: int) -> Slot:
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
        if not share.door:
            return None
        return Replica(share.door if details.copied else "", share.group, details.safe)

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
            self._keeper.layout(digest, seldom, self._final_flush(order))
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
            versions={"elastane": elastane.__version__, "torch": str(torch.__version__)},
            reason=order.reason,
            part=share.part,
            parts=share.parts,
            ranges=share.ranges,
            small=share.part == 0,
            keep=order.keep,
            wait_s=TOGETHER_S,
        )
