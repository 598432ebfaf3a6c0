"""Which saved states the ranks can reach, and which one all of them restore.

`choose` is pure: all ranks choose the newest valid state from the inventories of all. A snapshot
counts if it is whole on one node, or, for sharded state, on all nodes together. A checkpoint counts
for every rank that shares its place. `InventoryExchange` collects the inventories: one rank of each
place lists what is stored there by the records alone, and the chosen checkpoint is read byte by
byte later. Storage that cannot be read is reported as a fault, never as empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from elastane.checkpoint.folder_identity import FolderIdentity
from elastane.checkpoint.members import Members
from elastane.protocol.checkpoints import Fence, Key, folder_name
from elastane.storage.errors import storage_error
from elastane.storage.repository import FoundCheckpoint, Repository

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
    """The states that one rank can reach. `place` and `keeper` identify its folder and its server.

    `held` are whole snapshots in memory, `parts` those of sharded states. One rank of each place
    lists what is `stored` there according to the records, newest first; newer ones that were
    `skipped`, with reasons; and the greatest published `fence`. `fault`: the place is unreadable.
    """

    keeper: str
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
    # Of one step prefer memory; a final flush of the same step has another nonce.
    save, memory = max(candidates, key=lambda each: (each[0].key, each[1], each[0].nonce))
    spans: list[tuple[tuple[int, int], ...]] = []
    if memory:
        spans = [_spans_of(save, each) for each in inventories]
        having = {each.keeper for each in inventories if save in each.held}
        pairs = zip(inventories, spans, strict=True)
        reached = [bool(some) or each.keeper in having for each, some in pairs]
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


class InventoryExchange:
    """The inventories of all ranks, exchanged; all ranks call `inventories` together."""

    def __init__(
        self, members: Members, keeper: str, repository: Repository, place: FolderIdentity
    ) -> None:
        self._members, self._keeper = members, keeper
        self._repository, self._place = repository, place
        self.stored: dict[SaveId, FoundCheckpoint] = {}

    def inventories(self, whole: Sequence[SaveId], parts: Sequence[StatePart]) -> list[Inventory]:
        """Return the inventory of each rank; `whole` and `parts` are in this node's memory."""
        fault = "" if self._place.known else self._place.fault
        own = Inventory(self._keeper, self._place.known, tuple(whole), tuple(parts), fault=fault)
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
