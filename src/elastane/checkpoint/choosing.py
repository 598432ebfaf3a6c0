"""Which state all ranks restore: the newest that is valid, wherever it is held.

Pure: from what each rank says that it has, all ranks come to the same choice. What a keeper holds
in memory counts where it is whole there, and of sharded state where the keepers have it together;
what a place holds counts for all ranks of that place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from elastane.protocol.checkpoints import Fence, Key, folder_name


class Save(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One save, newest last in their order."""

    key: Key
    nonce: str

    @property
    def folder(self) -> str:
        """Where it is, or would be, in storage."""
        return folder_name(self.key, self.nonce)


class StatePart(msgspec.Struct, frozen=True, array_like=True):
    """What one keeper has of a sharded state: spans of its image, [first, end)."""

    save: Save
    image_bytes: int
    spans: tuple[tuple[int, int], ...]


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """What one rank can reach. `place` is that of its folder, `keeper` that of its node.

    `held` are whole in memory; `parts` is what there is of sharded states.
    One rank of each place says what is `stored` there, as far as its records say, newest first,
    what newer ones were `skipped`, with reasons, and the greatest `fence` of all that is published.
    `fault`: the place could not be read.
    """

    keeper: str
    place: str
    held: tuple[Save, ...] = ()
    parts: tuple[StatePart, ...] = ()
    stored: tuple[Save, ...] = ()
    skipped: tuple[str, ...] = ()
    fault: str = ""
    fence: Fence | None = None


class Choice(msgspec.Struct, frozen=True):
    """`memory`: it is in keepers' memory. `givers` have it, the first of them gives it to others.

    `lacking` ranks cannot reach it themselves. `spans`: of sharded state in memory, what each rank
    can reach of its image.
    """

    save: Save
    memory: bool
    givers: tuple[int, ...]
    lacking: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()


def choose(
    inventories: Sequence[Inventory], failed: Collection[tuple[Save, bool]] = ()
) -> Choice | None:
    """Return what to restore, and from whom; None where nobody has anything."""
    candidates = {(save, True) for each in inventories for save in each.held}
    candidates |= {(save, False) for each in inventories for save in each.stored}
    candidates |= {(save, True) for save in _together(inventories)}
    candidates -= set(failed)
    if not candidates:
        return None
    # Of one step memory comes first: a last gasp has a nonce of its own.
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


def _together(inventories: Sequence[Inventory]) -> set[Save]:
    """Return the sharded states of which all keepers together have the whole."""
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


def _spans_of(save: Save, inventory: Inventory) -> tuple[tuple[int, int], ...]:
    return tuple(span for part in inventory.parts if part.save == save for span in part.spans)


def first_of_each_place(places: Sequence[str]) -> list[int]:
    """Return the rank that speaks for each place."""
    return [places.index(place) for place in dict.fromkeys(places)]
