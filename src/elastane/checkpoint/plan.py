"""A layout, this rank's share of it, and what a keeper is told with each save.

Made once, and anew when the state's tensors or the ranks change: slots are mapped and laid out
then. The small files of a save are made here: those that seldom change are sent to the keeper once.
"""

from __future__ import annotations

import msgspec
import torch
import xxhash

import elastane
from elastane.checkpoint.capture import Captured, Small
from elastane.checkpoint.dcp import METADATA, PLAIN, Plain, metadata
from elastane.checkpoint.layout import Layout
from elastane.checkpoint.shares import SaveShare
from elastane.checkpoint.slots import Slot, Sources
from elastane.checkpoint.state_source import SavingWorld
from elastane.checkpoint.stored import LAYOUT, STATE, StoredFiles, encoded
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import Keeper
from elastane.snapshots.messages import PersistRequest, Replica, Snapshot

SLOTS = 3
# Copies have two snapshots stay where they are for a while: see snapshots/rules/snapshots.py.
SLOTS_WITH_COPIES = 4
# How long the writers of one checkpoint wait for each other.
TOGETHER_S = 600.0


class SaveOrder(msgspec.Struct, frozen=True):
    """What one save is to be: `reason` is step, time, asked or leave."""

    step: int
    reason: str
    keep: int
    job: str


class SaveDetails(msgspec.Struct, frozen=True):
    """What else is said of one save; `durable`: it is to be written out.

    `copied`: other nodes are to hold copies of it. `safe` is the last save of which all do,
    `together` the last that all ranks have kept; "" where there is none yet.
    """

    nonce: str
    durable: bool
    copied: bool = False
    safe: str = ""
    together: str = ""


class SavePlan:
    """One rank's, for one layout and one set of ranks. `captured` is the first state of it."""

    def __init__(
        self,
        keeper: Keeper,
        where: str,
        layout: Layout,
        share: SaveShare,
        captured: Captured,
        world: SavingWorld,
    ) -> None:
        self._keeper, self._where = keeper, where
        self.layout, self.share = layout, share
        self.sources = Sources(layout, share, captured, world.optimizers())
        self._world = world.members().size
        slots = SLOTS_WITH_COPIES if share.door else SLOTS
        fds = keeper.slots(slots, max(1, share.end - share.first))
        self._slots = [Slot(fd, layout, share) for fd in fds]
        self._plain = Plain()
        self._index: tuple[tuple[int, ...], str] | None = None
        self._layout = encoded(layout)

    def slot(self, number: int) -> Slot:
        """Return the slot that the keeper has granted."""
        return self._slots[number]

    def snapshot(
        self, small: Small | None, streams: bytes, key: Key, order: SaveOrder, more: SaveDetails
    ) -> Snapshot:
        """Return what the keeper is told of a save; `small` is for the first rank of each node."""
        share = self.share
        files, digest = self._small_files(small, key.step, order) if small else ({}, "")
        return Snapshot(
            key=key,
            nonce=more.nonce,
            local=share.local,
            locals=share.locals,
            first=share.first,
            end=share.end,
            image_bytes=self.layout.image_bytes,
            files=files,
            layout=digest,
            streams=streams,
            replicated=self.layout.replicated,
            together=more.together,
            persist=self._persist(order) if more.durable else None,
            replica=self._replica(more),
        )

    def _replica(self, more: SaveDetails) -> Replica | None:
        share = self.share
        if not share.door:
            return None
        return Replica(share.door if more.copied else "", share.group, more.safe)

    def _small_files(
        self, small: Small, step: int, order: SaveOrder
    ) -> tuple[dict[str, bytes], str]:
        """Return the files that change with each save, and the digest of those that seldom do."""
        written = self._plain.written(small.leaves)
        stored = StoredFiles(small.tree(), self.share.all_ranges, step, self._world)
        files = {STATE: encoded(stored), PLAIN: b"".join(written.values())}
        sizes = tuple(map(len, written.values()))
        if self._index is None or self._index[0] != sizes:
            index = metadata(self.layout, [*self.share.all_ranges], written, small.paths)
            seldom = {LAYOUT: self._layout, METADATA: index}
            digest = xxhash.xxh3_128_hexdigest(b"".join(seldom.values()))
            self._keeper.layout(digest, seldom, self._gasp(order))
            self._index = sizes, digest
        return files, self._index[1]

    def _gasp(self, order: SaveOrder) -> PersistRequest:
        """Return what the keeper is to write when nobody is left to ask: all that it holds."""
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
