"""Restores the newest valid state on all ranks.

Owns the order of attempts: of one step, memory before storage; a state that cannot be read is
reported and the next is tried, on all ranks alike. If states exist and none can be read it raises
CheckpointError, and no job starts from zero; live tensors may then hold partial data. All other
state is loaded only after every rank has read all of it.

`choose` is pure: all ranks choose the newest valid state from the inventories of all. A snapshot
counts if it is whole on one node, or, for sharded state, on all nodes together. A checkpoint counts
for every rank that shares its place. `InventoryExchange` collects the inventories: one rank of each
place lists what is stored there by the records alone, and the chosen checkpoint is read byte by
byte later. Storage that cannot be read is reported as a fault, never as empty.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copy_on_write import CopyOnWriteRestore, CopyOnWriteTensors
from elastane.checkpoint.layout import Layout, Tensor, dtype_of
from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import (
    ByteSource,
    CheckpointFiles,
    CheckpointTransfer,
    Destination,
    MemoryPieces,
    ReceivedBytes,
    broadcast,
    counted,
    fill,
    gather,
    restore_progress,
)
from elastane.checkpoint.registered import restore_streams
from elastane.checkpoint.small_files import (
    LAYOUT,
    STATE,
    StoredFiles,
    layout_from,
    require_ranges,
    small_file,
    stored_from,
    streams_of,
    unreadable,
)
from elastane.checkpoint.state_source import StateSource
from elastane.comms.state import build
from elastane.errors import CheckpointError, StateError
from elastane.protocol.checkpoints import Fence, Key, era_beyond, folder_name
from elastane.snapshots.client import HeldSnapshot, SnapshotClient
from elastane.storage import Storage
from elastane.storage.places import FolderIdentity, storage_error
from elastane.storage.repository import FoundCheckpoint, Repository

_log = logging.getLogger("elastane.checkpoint")
_STREAMS = "streams-"


# Only the newest are candidates: more than that are never damaged together.
_CANDIDATES_MAX = 16


class SaveId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies one save; ordered oldest first."""

    key: Key
    nonce: str

    @property
    def folder(self) -> str:
        """Its folder in storage, whether it was written or not."""
        return folder_name(self.key, self.nonce)


class StatePart(msgspec.Struct, frozen=True, array_like=True):
    """One node's part of a sharded state: ranges [first, end) of its serialized layout."""

    save: SaveId
    image_bytes: int
    spans: tuple[tuple[int, int], ...]


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """The states that one rank can reach. `place` and `server` identify its folder and its server.

    `held` are whole snapshots in memory, `parts` those of sharded states. One rank of each place
    lists what is `stored` there according to the records, newest first; newer ones that were
    `skipped`, with reasons; and the greatest published `fence`. `fault`: the place is unreadable.
    """

    server: str
    place: str
    held: tuple[SaveId, ...] = ()
    parts: tuple[StatePart, ...] = ()
    stored: tuple[SaveId, ...] = ()
    skipped: tuple[str, ...] = ()
    fault: str = ""
    fence: Fence | None = None


class Choice(msgspec.Struct, frozen=True):
    """A state to restore. `memory`: from snapshots, else from storage.

    `givers` are the ranks that have it; the first sends it to the `lacking` ranks. `spans` are the
    ranges of a sharded state in memory that each rank can read.
    """

    save: SaveId
    memory: bool
    givers: tuple[int, ...]
    lacking: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()


def choose(
    inventories: Sequence[Inventory], failed: Collection[tuple[SaveId, bool]] = ()
) -> Choice | None:
    """Return the state to restore and its sources, or None if no rank has any."""
    candidates = {(save, True) for each in inventories for save in each.held}
    candidates |= {(save, False) for each in inventories for save in each.stored}
    candidates |= {(save, True) for save in _together(inventories)}
    candidates -= set(failed)
    if not candidates:
        return None
    # If memory and storage have the same step, prefer memory. A final flush of that step has
    # another nonce, so it is another save.
    save, memory = max(candidates, key=lambda each: (each[0].key, each[1], each[0].nonce))
    spans: list[tuple[tuple[int, int], ...]] = []
    if memory:
        spans = [_spans_of(save, each) for each in inventories]
        having = {each.server for each in inventories if save in each.held}
        pairs = zip(inventories, spans, strict=True)
        reached = [bool(some) or each.server in having for each, some in pairs]
    else:
        having = {each.place for each in inventories if save in each.stored}
        reached = [each.place in having for each in inventories]
    givers = tuple(rank for rank, there in enumerate(reached) if there)
    lacking = tuple(rank for rank, there in enumerate(reached) if not there)
    return Choice(save, memory, givers, lacking, tuple(spans) if any(spans) else ())


def _together(inventories: Sequence[Inventory]) -> set[SaveId]:
    """Return the sharded states that the servers hold completely together."""
    parts = [part for each in inventories for part in each.parts]
    found = set()
    for save in {part.save for part in parts}:
        mine = [part for part in parts if part.save == save]
        reached = 0
        for first, end in sorted(span for part in mine for span in part.spans):
            if first > reached:
                break
            reached = max(reached, end)
        if reached >= max(part.image_bytes for part in mine):
            found.add(save)
    return found


def _spans_of(save: SaveId, inventory: Inventory) -> tuple[tuple[int, int], ...]:
    return tuple(span for part in inventory.parts if part.save == save for span in part.spans)


def first_of_each_place(places: Sequence[str]) -> list[int]:
    """Return the first rank of each place, which acts for it."""
    return [places.index(place) for place in dict.fromkeys(places)]


def without(
    inventories: Sequence[Inventory], save: SaveId, bad: Mapping[int, str]
) -> list[Inventory]:
    """Return the inventories without a checkpoint in the places of the ranks in `bad`."""
    places = {inventories[rank].place for rank in bad}
    return [
        msgspec.structs.replace(each, stored=tuple(s for s in each.stored if s != save))
        if each.place in places
        else each
        for each in inventories
    ]


class InventoryExchange:
    """The inventories of all ranks, exchanged; all ranks call `inventories` together."""

    def __init__(
        self, members: Members, server: str, repository: Repository, place: FolderIdentity
    ) -> None:
        self._members = members
        self._server = server
        self._repository = repository
        self._place = place
        self.stored: dict[SaveId, FoundCheckpoint] = {}

    def inventories(self, whole: Sequence[SaveId], parts: Sequence[StatePart]) -> list[Inventory]:
        """Return the inventory of each rank; `whole` and `parts` are in this node's memory."""
        fault = "" if self._place.known else self._place.fault
        own = Inventory(self._server, self._place.known, tuple(whole), tuple(parts), fault=fault)
        firsts = first_of_each_place([each.place for each in self._exchange(own)])
        if self._place.known and self._members.rank in firsts:
            own = self._with_stored(own)
        return self._exchange(own)

    def verify(self, save: SaveId) -> str:
        """Read a checkpoint of this rank's place; returns why it is invalid, or ""."""
        try:
            return self._repository.verify(self.stored[save])
        except OSError as error:
            return str(error)

    def _with_stored(self, own: Inventory) -> Inventory:
        try:
            published = self._repository.published()
        except OSError as error:
            return msgspec.structs.replace(
                own, fault=str(storage_error(self._repository.storage.where, error))
            )
        sound = [found for found in published if not found.reason]
        self.stored = {SaveId(found.key, found.nonce): found for found in sound[:_CANDIDATES_MAX]}
        oldest = sound[0].key if sound else None
        bad = [f for f in published if f.reason and (oldest is None or f.key > oldest)]
        return msgspec.structs.replace(
            own,
            stored=tuple(self.stored),
            skipped=tuple(f"{found.folder}: {found.reason}" for found in bad),
            fence=published[0].key.fence if published else None,
        )

    def _exchange(self, own: Inventory) -> list[Inventory]:
        received = self._members.texts(msgspec.msgpack.encode(own))
        return [msgspec.msgpack.decode(each, type=Inventory) for each in received]


class Restored(msgspec.Struct, frozen=True):
    """A restored state: `where` is its source; `skipped` are newer ones, each with a reason.

    `nonce` identifies a snapshot among those of its step; "" for a state from storage. `missed`: at
    least one node had nothing of it.
    """

    key: Key
    where: str
    skipped: tuple[str, ...] = ()
    nonce: str = ""
    missed: bool = False

    @property
    def step(self) -> int:
        """The number of finished steps that it was saved with."""
        return self.key.step


class _Opened(msgspec.Struct, frozen=True):
    """An opened state; `image` is None on a rank that only receives it."""

    layout: Layout
    stored: StoredFiles
    image: Any
    streams: bytes


class Restorer:
    """One restore, which all ranks make together."""

    def __init__(self, source: StateSource, server: SnapshotClient, repository: Repository) -> None:
        self._source = source
        self._server = server
        self._repository = repository
        self._members: Members = source.members()
        self._held: dict[SaveId, HeldSnapshot] = {}
        self._shared: tuple[CopyOnWriteTensors, HeldSnapshot] | None = None
        # A snapshot whose memory restored tensors still share.
        self.borrowed: CopyOnWriteRestore | None = None

    def newest(self, place: FolderIdentity, *, strict: bool) -> tuple[Restored | None, int]:
        """Restore the newest valid state, if any.

        Returns it with the era of the checkpoints of this run: a run whose rounds begin again at 0
        has a greater one, so that its checkpoints are newer than those of the former run.

        Raises CheckpointError if states exist and none can be restored.
        """
        self._members.numbers([0])  # A meeting point: a rank that waits alone logs a warning.
        self._source.prepare()
        held = self._snapshots()
        # A snapshot without a digest yet counts as whole; one that failed its digest is left out.
        self._held = {SaveId(h.key, h.words.nonce): h for h in held}
        exchange = InventoryExchange(self._members, self._server.id, self._repository, place)
        try:
            whole = [save for save, each in self._held.items() if _is_whole(each)]
            parts = [_part(save, each) for save, each in self._held.items() if save not in whole]
            found = exchange.inventories(whole, parts)
            self._require_storage(found)
            restored = self._newest_of(exchange, found, strict=strict)
            if restored is None:
                self._source.unprepare()
        finally:
            if self._shared is not None and self._shared[0].has_shared:
                # Also after a failed load, which may have loaded some of these tensors.
                held.remove(self._shared[1])
                self.borrowed = CopyOnWriteRestore(self._server, *self._shared)
            for each in held:
                with contextlib.suppress(ConnectionError):  # A lost server has nothing to release.
                    self._server.release(each)
        fences = [each.fence for each in found if each.fence is not None]
        fences += [save.key.fence for each in found for save in each.held]
        return restored, era_beyond(max(fences, default=None), *self._source.fence)

    def _snapshots(self) -> list[HeldSnapshot]:
        """Return the snapshots of this node's server; none if the server is lost meanwhile.

        Other nodes, or storage, then give the state, and the first save connects to the server that
        replaces the lost one.
        """
        try:
            return self._server.held()
        except ConnectionError as error:
            _log.warning("%s; what it held in memory is lost [snapshot-server-lost]", error)
            return []

    def _newest_of(
        self, exchange: InventoryExchange, found: list[Inventory], *, strict: bool
    ) -> Restored | None:
        failed, read = set[tuple[SaveId, bool]](), set[SaveId]()
        skipped = [why for each in found for why in each.skipped]
        while (choice := choose(found, failed)) is not None and not (strict and skipped):
            if not choice.memory and choice.save not in read:
                bad = self._invalid_on(exchange, choice, found)
                found = without(found, choice.save, bad)
                skipped += [f"{choice.save.folder}: {why}" for why in bad.values()]
                read.add(choice.save)
                continue
            why = self._try(choice, found)
            if not why:
                where = "memory" if choice.memory else self._repository.storage.where
                self._warn(f"skipped: {'; '.join(skipped)}" if skipped else "")
                nonce = choice.save.nonce if choice.memory else ""
                missed = bool(choice.lacking)
                return Restored(choice.save.key, where, tuple(skipped), nonce, missed)
            skipped.append(f"{choice.save.folder}: {why}")
            failed.add((choice.save, choice.memory))
        if skipped:
            raise _none_restorable(self._repository.storage.where, skipped, strict=strict)
        return None

    def _invalid_on(
        self, exchange: InventoryExchange, choice: Choice, found: Sequence[Inventory]
    ) -> dict[int, str]:
        """Verify a checkpoint byte by byte in each place; returns why it is invalid, by rank."""
        is_first = choice.save in found[self._members.rank].stored
        why = exchange.verify(choice.save) if is_first else ""
        reasons = [said.decode() for said in self._members.texts(why.encode())]
        return {rank: reason for rank, reason in enumerate(reasons) if reason}

    def _require_storage(self, found: Sequence[Inventory]) -> None:
        """Raise if storage is unreadable, unless memory has the newest state."""
        faults = [each.fault for each in found if each.fault]
        if not faults:
            return
        choice = choose(found)
        if choice is None or not choice.memory:
            raise CheckpointError(
                f"checkpoints cannot be looked for: {faults[0]}",
                expected="readable storage, since a job must not start over because it cannot read",
                next_step="mend the storage, and start again",
                slug="checkpoint-storage",
            )
        self._warn(f"going on from memory: {faults[0]} [checkpoint-storage]")

    def _warn(self, text: str) -> None:
        if text and self._members.rank == 0:
            _log.warning("%s", text)

    def _try(self, choice: Choice, found: Sequence[Inventory]) -> str:
        """Restore a choice; returns why a rank could not, or ""."""
        opened, state, why = None, None, ""
        try:
            if choice.lacking and not choice.memory:
                folder = choice.save.folder
                CheckpointTransfer(self._members, self._repository.storage, folder).run(
                    choice.givers[0], _writers(choice, found), choice.save.key.step
                )
            opened = self._open(choice)
            state = self._read(opened, choice)
        except (CheckpointError, OSError) as error:
            why = str(error)
        reasons = [said.decode() for said in self._members.texts(why.encode())]
        first = next((reason for reason in reasons if reason), "")
        if not first and opened is not None and state is not None:
            self._source.load(state)
            if opened.streams:
                restore_streams(opened.streams)
        return first

    def _open(self, choice: Choice) -> _Opened:
        if choice.memory:
            return self._open_memory(choice)
        storage = self._repository.storage
        folder = choice.save.folder
        layout, stored, image = open_files(storage, folder)
        names = sorted(name for name in storage.names(folder) if name.startswith(_STREAMS))
        streams = [small_file(storage, folder, name) for name in names]
        return _Opened(layout, stored, image, streams_of(streams, self._members.rank))

    def _open_memory(self, choice: Choice) -> _Opened:
        """Open a snapshot; ranks that lack it receive its small files from another rank."""
        held = self._held.get(choice.save)
        small, image = [b"", b"", b""], None
        if held is not None:
            words = held.words
            packed = msgspec.msgpack.encode([*words.streams.values()])
            small = [words.layout_files[LAYOUT], words.files[STATE], packed]
            image = MemoryPieces(held.pieces)
        if choice.lacking:
            said = self._members.texts(msgspec.msgpack.encode(small))[choice.givers[0]]
            small = small if held is not None else msgspec.msgpack.decode(said, type=list[bytes])
        streams = streams_of(small[2:], self._members.rank)
        return _Opened(layout_from(small[0]), stored_from(small[1]), image, streams)

    def _read(self, opened: _Opened, choice: Choice) -> dict[str, Any]:
        image: ByteSource = opened.image
        # A rank has only a part of a sharded state; what it receives is in its own memory.
        shared, self._shared = None, None
        if isinstance(image, MemoryPieces) and not choice.spans:
            shared = CopyOnWriteTensors(opened.layout, image)
            self._shared = shared, self._held[choice.save]
        tensors, destinations = places_for(opened.layout, self._source.state(), shared)
        what = f"restoring step {choice.save.key.step}"
        total_bytes = sum(each.tensor.nbytes for each in destinations)
        try:
            if choice.memory and choice.lacking and not choice.spans:
                image = self._receive(opened, choice)
            with restore_progress(what, total_bytes, self._members) as shown:
                if choice.spans:
                    gather(opened.layout, image, choice.spans, destinations, self._members, shown)
                else:
                    fill(opened.layout, counted(image, shown), destinations)
        finally:
            if isinstance(opened.image, CheckpointFiles):
                opened.image.close()
        return state_of(opened.stored, tensors)

    def _receive(self, opened: _Opened, choice: Choice) -> ByteSource:
        """Receive a state from a rank that has it; all ranks take part."""
        source, rank = choice.givers[0], self._members.rank
        arrived = ReceivedBytes(opened.layout.image_bytes) if rank in choice.lacking else None
        own = opened.image if rank == source else None
        total_bytes, what = opened.layout.image_bytes, f"receiving step {choice.save.key.step}"
        with restore_progress(what, total_bytes, self._members) as shown:
            for at, data in broadcast(total_bytes, own, self._members, source):
                if arrived is not None:
                    arrived.data[at : at + len(data)] = data
                if shown is not None:
                    shown.reach(at + len(data))
        return arrived if arrived is not None else opened.image


def open_files(storage: Storage, folder: str) -> tuple[Layout, StoredFiles, CheckpointFiles]:
    """Open a valid checkpoint in storage; the caller closes the files."""
    stored = stored_from(small_file(storage, folder, STATE))
    layout = layout_from(small_file(storage, folder, LAYOUT))
    require_ranges(storage, folder, stored, layout)
    return layout, stored, CheckpointFiles(storage, folder, stored.ranges)


def state_of(stored: StoredFiles, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the saved state with these tensors in it; CheckpointError if it has no names."""
    try:
        state = build(stored.tree, tensors)
    except StateError as error:
        raise unreadable(STATE, error.what) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise unreadable(STATE, "its content is no mapping of names to states")
    return state


def places_for(
    layout: Layout, live: Mapping[str, Any], shared: CopyOnWriteTensors | None = None
) -> tuple[list[Any], list[Destination]]:
    """Return a tensor for each of the layout's, and the destinations to read.

    A live tensor that fits is used in place; others share a snapshot's memory, or are new.
    """
    captured = Captured(live)
    originals = captured.originals
    by_name = {name: number for number, name in enumerate(captured.names)}
    offsets = {chunk.tensor: chunk.offsets for chunk in captured.chunks}
    tensors: list[Any] = []
    destinations: list[Destination] = []
    for number, spec in enumerate(layout.tensors):
        own = by_name.get(spec.name, -1)
        if own >= 0 and captured.specs[own] == spec and not _overlaps(captured.tensors[own]):
            local, whole = captured.tensors[own], originals[own]
            at = offsets.get(own, (0,) * local.dim())
        elif shared is not None and (tensor := shared.tensor(number)) is not None:
            tensors.append(tensor)
            continue
        else:
            local = whole = _new(spec)
            at = (0,) * local.dim()
        tensors.append(whole)
        destinations.append(Destination(number, at, local))
    return tensors, destinations


def _new(spec: Tensor) -> torch.Tensor:
    try:
        return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    except RuntimeError as error:
        raise CheckpointError(
            f"{spec.name}: no memory for {list(spec.shape)} values of {spec.dtype}: {error}",
            expected="memory for the whole state",
            next_step="restore it on a machine with more memory",
            slug="checkpoint-layout",
        ) from error


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements share memory, as after expand(): such a tensor cannot be filled."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_whole(held: HeldSnapshot) -> bool:
    size = sum(end - first for first, end, _fd in held.pieces)
    return held.words.replicated and size >= held.words.image_bytes


def _part(save: SaveId, held: HeldSnapshot) -> StatePart:
    spans = sorted((first, end) for first, end, _fd in held.pieces)
    return StatePart(save, held.words.image_bytes, tuple(spans))


def _writers(choice: Choice, heard: Sequence[Inventory]) -> Collection[int]:
    """Return the ranks that write the checkpoint to places that lack it."""
    firsts = first_of_each_place([each.place for each in heard])
    return [rank for rank in firsts if rank in choice.lacking]


def _none_restorable(where: str, skipped: Sequence[str], *, strict: bool) -> CheckpointError:
    if strict:
        return CheckpointError(
            skipped[0],
            where=where,
            expected="no damaged checkpoint, as strict=True has it",
            next_step="elastane checkpoint verify, and move it away; or restore without strict",
            slug="checkpoint-invalid",
        )
    return CheckpointError(
        f"nothing can be restored: {'; '.join(skipped[:3])}",
        where=where,
        expected="a checkpoint that is valid, and storage that can be read",
        next_step="elastane checkpoint verify; to start over, name another folder",
        slug="checkpoint-none-valid",
    )
