"""The plan of saves: a layout, this rank's share of it, its slots, and the messages of each save.

It is made once, and again when the tensors or the ranks change; slots are mapped and laid out then.
The bytes around each piece are written once into each slot, so that a save copies only data, at the
speed of memory. Pages are touched when a slot is mapped: otherwise the first copy would take
sixteen times as long. Small files that change seldom are sent to the snapshot server once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
import xxhash

import elastane
from elastane.checkpoint.capture import Captured, SmallState, held_of
from elastane.checkpoint.dcp import METADATA, PLAIN, PlainLeaves, metadata
from elastane.checkpoint.layout import Layout, dtype_of, part_of
from elastane.checkpoint.shares import SaveShare
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


class Slot:
    """One slot, prepared for one share of one layout."""

    def __init__(self, fd: int, layout: Layout, share: SaveShare) -> None:
        self._memory = mmap.mmap(
            fd, max(1, share.end - share.first), mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        os.close(fd)
        image = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.places = []
        for piece in layout.within(share.first, share.end):
            frame, at = layout.frame(piece), piece.at - share.first
            data = at + len(frame.head)
            self._memory[at:data] = frame.head
            behind = data + frame.data_bytes
            self._memory[behind : behind + len(frame.tail)] = frame.tail
            dtype = dtype_of(layout.tensors[piece.tensor].dtype)
            self.places.append(image[data:behind].view(dtype).view(piece.shape))


class CopySources:
    """The parts of a state's tensors in one share, in the order of a slot's places."""

    def __init__(
        self,
        layout: Layout,
        share: SaveShare,
        captured: Captured,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        pieces = layout.within(share.first, share.end)
        self._numbers = [piece.tensor for piece in pieces]
        offsets = {chunk.tensor: chunk.offsets for chunk in captured.chunks}
        self._parts = [
            (at, piece, offsets[piece.tensor])
            for at, piece in enumerate(pieces)
            if tuple(captured.tensors[piece.tensor].shape) != piece.shape
        ]
        stepped = _stepped(optimizers)
        on_cpu = all(tensor.device.type == "cpu" for tensor in captured.tensors)
        is_stepped = [tensor.data_ptr() in stepped for tensor in captured.tensors]
        # Changed only by an optimizer's step.
        self.late = [on_cpu and is_stepped[number] for number in self._numbers]
        # Must be known to have their shapes and dtypes before they are copied or cut.
        at_once = [n for n, late in zip(self._numbers, self.late, strict=True) if not late]
        self.doubtful = sorted({*at_once, *(piece.tensor for _, piece, _ in self._parts)})

    def views(
        self, tensors: Sequence[torch.Tensor], others: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the parts of `tensors`; `others`, by number, replace some of those."""
        if others:
            tensors = [others.get(number, own) for number, own in enumerate(tensors)]
        found = [tensors[number] for number in self._numbers]
        for at, piece, offsets in self._parts:
            found[at] = part_of(found[at], piece, offsets)
        return found


def _stepped(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of the tensors that optimizers change in their steps."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}).values()
                tensors = [each for each in state if isinstance(each, torch.Tensor)]
                found |= {held_of(each).data_ptr() for each in (parameter, *tensors)}
    return found
