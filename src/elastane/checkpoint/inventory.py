"""Collects the saved states that each rank can reach: in its server's memory, in its place.

One rank of each place lists what is stored there by the records alone; the chosen checkpoint is
read byte by byte later. Storage that cannot be read is reported as a fault, never as empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from elastane.checkpoint.choosing import Inventory, SaveId, StatePart, first_of_each_place
from elastane.checkpoint.folder_identity import FolderIdentity
from elastane.checkpoint.members import Members
from elastane.storage.errors import storage_error
from elastane.storage.repository import FoundCheckpoint, Repository

# Only the newest are candidates: more than that are never damaged together.
_CANDIDATES_MAX = 16


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
