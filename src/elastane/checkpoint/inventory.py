"""What each rank can reach of states that were saved: in its keeper's memory, in its place.

One rank of each place looks at what is stored there, by the records alone; what is chosen is read
byte by byte later. Storage that cannot be read is told as a fault and not taken for empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from elastane.checkpoint.choosing import Inventory, Save, StatePart, first_of_each_place
from elastane.checkpoint.folder_identity import StoragePath
from elastane.checkpoint.members import Members
from elastane.storage.errors import trouble
from elastane.storage.repository import FoundCheckpoint, Repository

# So many of the newest are candidates; more than that are never damaged together.
_CANDIDATES_MAX = 16


class Looking:
    """One rank's look; all ranks call `inventories` together."""

    def __init__(
        self, members: Members, keeper: str, repository: Repository, place: StoragePath
    ) -> None:
        self._members, self._keeper = members, keeper
        self._repository, self._place = repository, place
        self.stored: dict[Save, FoundCheckpoint] = {}

    def inventories(self, whole: Sequence[Save], parts: Sequence[StatePart]) -> list[Inventory]:
        """Return what each rank can reach; `whole` and `parts` are in this one's memory."""
        fault = "" if self._place.known else self._place.fault
        own = Inventory(self._keeper, self._place.known, tuple(whole), tuple(parts), fault=fault)
        firsts = first_of_each_place([each.place for each in self._told(own)])
        if self._place.known and self._members.rank in firsts:
            own = self._looked(own)
        return self._told(own)

    def verify(self, save: Save) -> str:
        """Read a checkpoint of this rank's place; returns why it is not valid."""
        try:
            return self._repository.verify(self.stored[save])
        except OSError as error:
            return str(error)

    def _looked(self, own: Inventory) -> Inventory:
        try:
            published = self._repository.published()
        except OSError as error:
            return msgspec.structs.replace(
                own, fault=str(trouble(self._repository.storage.where, error))
            )
        sound = [found for found in published if not found.reason]
        self.stored = {Save(found.key, found.nonce): found for found in sound[:_CANDIDATES_MAX]}
        oldest = sound[0].key if sound else None
        bad = [f for f in published if f.reason and (oldest is None or f.key > oldest)]
        return msgspec.structs.replace(
            own,
            stored=tuple(self.stored),
            skipped=tuple(f"{found.folder}: {found.reason}" for found in bad),
            fence=published[0].key.fence if published else None,
        )

    def _told(self, own: Inventory) -> list[Inventory]:
        said = self._members.texts(msgspec.msgpack.encode(own))
        return [msgspec.msgpack.decode(each, type=Inventory) for each in said]


def without(heard: Sequence[Inventory], save: Save, bad: Mapping[int, str]) -> list[Inventory]:
    """Return the inventories without a checkpoint in the places of these ranks."""
    places = {heard[rank].place for rank in bad}
    return [
        msgspec.structs.replace(each, stored=tuple(s for s in each.stored if s != save))
        if each.place in places
        else each
        for each in heard
    ]
