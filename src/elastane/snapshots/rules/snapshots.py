"""The books of a keeper: which slot is filled next, which snapshot is whole, which is written out.

Pure: it knows slots, workers and snapshots by number and name, and nothing of memory, sockets,
files or clocks. Each call records one event and returns what follows from it, in order. A call
that no honest worker makes is a ValueError, and changes nothing.

A slot that is part of the newest whole snapshot, of one that is being written or of one that
somebody reads is never granted and never dropped. Three slots a worker are enough for that a
grant never waits for storage: one is being written, one holds the newest, one is filled. Two more
are pinned where copies go to other nodes; a fourth slot is enough then: at worst the newest goes.
So it does where an older one is the last that all nodes together have, of state that is sharded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from elastane.protocol.checkpoints import Key

# Whole snapshots that are held, beside those that are written or read. The one before the newest is
# for the case that the newest is not whole on another node, or does not pass its digest.
WHOLE_MAX = 2


class Name(NamedTuple):
    """What names a snapshot on all nodes: when it was, and which save of that moment it is of."""

    key: Key
    nonce: str


class Whole(NamedTuple):
    """All local workers have kept their pieces: from now on this snapshot can be given out."""

    name: Name


class Write(NamedTuple):
    """Begin to write it out; `written` is called when that has ended, however it did.

    `gasp`: nobody asked for it; this node writes what it holds, since its workers are gone.
    """

    name: Name
    gasp: bool


class Superseded(NamedTuple):
    """It was to be written, and will not be: storage was busy, and a newer one is there."""

    name: Name


class Forget(NamedTuple):
    """Nothing holds it any more; whatever belongs to it may go."""

    name: Name


class Drop(NamedTuple):
    """Give the memory of this slot back."""

    slot: int


Effect = Whole | Write | Superseded | Forget | Drop


class SnapshotPiece(NamedTuple):
    """What one worker keeps: its share of a snapshot of `locals` workers of this node.

    `together`: the last save that all nodes kept, where what one has is of no use alone; else "".
    """

    name: Name
    local: int
    locals: int
    persist: bool
    together: str = ""


@dataclass(slots=True)
class _Slot:
    size_bytes: int
    owner: int  # who fills it; may be gone
    filled_by: int = 0
    granted: bool = False
    holds: Name | None = None
    retired: bool = False  # of a size that its owner does not use any more


@dataclass(slots=True)
class _Snapshot:
    locals: int
    slots: dict[int, int] = field(default_factory=dict)  # by local
    persist: int = 0  # how many of its pieces came with the wish to have it written
    readers: Counter[int] = field(default_factory=Counter)  # times, by worker
    spoiled: bool = False

    @property
    def is_full(self) -> bool:
        return len(self.slots) == self.locals

    @property
    def is_whole(self) -> bool:
        return self.is_full and not self.spoiled


class Snapshots:
    """The books. `writing` is what is being written out now, `published` the newest durable."""

    def __init__(self) -> None:
        self._together = ""
        self.writing: Name | None = None
        self.waiting: Name | None = None
        self.published: Key | None = None
        self._slots: dict[int, _Slot] = {}
        self._snapshots: dict[Name, _Snapshot] = {}
        self._workers: dict[int, tuple[int, Key] | None] = {}  # the last local and key of each
        self._gasps = self._leaving = False
        self._gasped: set[Name] = set()
        self._pinned: frozenset[Name] = frozenset()
        self._effects: list[Effect] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is written or waits to be."""
        return self.writing is None and self.waiting is None

    @property
    def workers(self) -> int:
        """How many workers are there."""
        return len(self._workers)

    def whole(self) -> list[Name]:
        """Return the snapshots that can be given out, newest first."""
        return sorted((n for n, s in self._snapshots.items() if s.is_whole), reverse=True)

    def slots_of(self, name: Name) -> dict[int, int]:
        """Return the slots of a snapshot by local worker."""
        return dict(self._snapshots[name].slots)

    # What workers do.

    def came(self, worker: int) -> None:
        """A worker is there: what its node holds is not the last of it."""
        self._workers[worker] = None
        self._gasps = self._leaving

    def own(self, worker: int, size_bytes: int) -> tuple[list[int], list[Effect]]:
        """Return the slots of this size that a worker has, those of a worker that is gone if none.

        What has another size, its own or of the dead, goes as soon as nothing needs it.
        """
        owners = sorted({slot.owner for slot in self._slots.values()} - {*self._workers})
        left = (self._owned(owner, size_bytes) for owner in (worker, *owners))
        mine = next(filter(None, left), [])
        for number in mine:
            self._slots[number].owner = worker
        for slot in self._slots.values():
            if slot.owner == worker and slot.size_bytes != size_bytes:
                slot.retired, slot.granted = True, False
        self._drop_unused(lambda slot: slot.retired or slot.size_bytes != size_bytes)
        return mine, self._taken()

    def add(self, worker: int, size_bytes: int, slots: Iterable[int]) -> None:
        """A worker has these new slots as well."""
        for number in slots:
            self._slots[number] = _Slot(size_bytes, worker)

    def grant(
        self, worker: int, *, overdue: bool = False, spare: bool = False, together: str = ""
    ) -> tuple[int | None, list[Effect]]:
        """Return the slot that a worker is to fill next; None: there is none yet.

        What makes room is the oldest whole snapshot, then one that waits to be written, one that is
        not whole yet (at once where a worker that is gone has kept the piece, else when it is
        `overdue`), and the newest where an older one is to go on from. `spare`: nothing does.
        """
        self._together = together or self._together
        mine = [n for n, s in sorted(self._slots.items()) if s.owner == worker and not s.retired]
        granted = next((n for n in mine if self._slots[n].granted), None)
        if granted is not None:
            return granted, []
        if not spare and all(self._slots[number].holds for number in mine):
            self._make_room(worker, mine, overdue)
        free = next((n for n in mine if self._slots[n].holds is None), None)
        if free is not None:
            self._slots[free].granted = True
        return free, self._taken()

    def keep(self, worker: int, slot: int, piece: SnapshotPiece) -> list[Effect]:
        """A worker has filled the slot that it was granted: its piece of a snapshot."""
        held = self._slots.get(slot)
        if held is None or held.owner != worker or not held.granted:
            raise ValueError(f"slot {slot} is not granted to this worker")
        snapshot = self._snapshots.get(piece.name) or _Snapshot(piece.locals)
        if not 0 <= piece.local < piece.locals or piece.locals != snapshot.locals:
            raise ValueError(f"worker {piece.local} of {piece.locals}, among {snapshot.locals}")
        if piece.local in snapshot.slots:
            raise ValueError(f"worker {piece.local} has kept its piece of this snapshot already")
        self._together = piece.together or self._together
        self._snapshots[piece.name] = snapshot
        snapshot.slots[piece.local] = slot
        snapshot.persist += piece.persist
        held.granted, held.holds, held.filled_by = False, piece.name, worker
        self._workers[worker] = (piece.local, piece.name.key)
        if snapshot.is_whole:
            self._completed(piece.name, snapshot)
        self._give_up_passed()
        return self._taken()

    def read(self, worker: int, count: int | None = None) -> list[Name]:
        """A worker reads the newest whole snapshots, all or `count`, until it says otherwise."""
        for name in (names := self.whole()[:count]):
            self._snapshots[name].readers[worker] += 1
        return names

    def reads(self, worker: int) -> bool:
        """Whether a worker has not released all that it was given to read."""
        return any(worker in snapshot.readers for snapshot in self._snapshots.values())

    def release(self, worker: int, name: Name) -> list[Effect]:
        """A worker has read a snapshot; one that it did not read is nothing."""
        if name in self._snapshots:
            self._snapshots[name].readers -= Counter([worker])
        self._trim()
        return self._taken()

    def gone(self, worker: int) -> list[Effect]:
        """A worker is no more: what it was filling is nothing, what it has kept stays."""
        last = self._workers.pop(worker)
        for slot in self._slots.values():
            slot.granted &= slot.owner != worker
        for snapshot in self._snapshots.values():
            snapshot.readers.pop(worker, None)
        if last is not None:
            self._give_up_without(*last)
        self._drop_unused(lambda slot: slot.retired)
        self._trim()
        return self._taken()

    # What the keeper does.

    def spoil(self, name: Name) -> list[Effect]:
        """A snapshot does not pass its digest: it is given to nobody."""
        if name in self._snapshots:
            self._snapshots[name].spoiled = True
            self._not_written(name)
        self._trim()
        return self._taken()

    def pin(self, names: frozenset[Name]) -> list[Effect]:
        """These stay until others are pinned."""
        self._pinned = names
        self._trim()
        return self._taken()

    def durable(self, key: Key) -> None:
        """A checkpoint of this key is published."""
        self.published = max(self.published or key, key)

    def written(self, name: Name, *, alone: bool = False) -> list[Effect]:
        """The writing of a snapshot has ended, whether it became durable or not.

        `alone`: the other nodes did not do their parts. An older one may be whole on all of them.
        """
        assert name == self.writing, (name, self.writing)
        self.writing = None
        if name in self._gasped and not alone:
            self._gasped |= {older for older in self.whole() if older < name}
        self._write_next()
        self._trim()
        return self._taken()

    def gasp(self, *, leaving: bool = False) -> list[Effect]:
        """The workers are gone: have the newest written, once for each, if it is not durable.

        `leaving`: nobody comes any more, so it is tried once more where it failed before.
        """
        self._gasps = True
        if leaving and not self._leaving:
            self._leaving, self._gasped = True, set()
        if self.writing is None:
            self._write_next()
        return self._taken()

    # Inside.

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _owned(self, worker: int, size_bytes: int) -> list[int]:
        mine = [(n, s) for n, s in self._slots.items() if s.owner == worker and not s.retired]
        return sorted(number for number, slot in mine if slot.size_bytes == size_bytes)

    def _completed(self, name: Name, snapshot: _Snapshot) -> None:
        self._effects.append(Whole(name))
        for other, older in [*self._snapshots.items()]:
            if other.key < name.key and not older.is_full:
                self._forget(other)
        if snapshot.persist == snapshot.locals:
            self._enqueue(name)
        self._trim()
        self._drop_unused(lambda slot: True)

    def _enqueue(self, name: Name) -> None:
        first, last = sorted((name, self.waiting or name))
        if self.waiting is not None:
            self._effects.append(Superseded(first))
        self.waiting = last
        if self.writing is None:
            self._write_next()

    def _write_next(self) -> None:
        name, gasp = self.waiting, False
        if name is None and self._gasps:
            name = next((other for other in self.whole() if self._is_worth_it(other)), None)
            gasp = name is not None
            self._gasped |= {name} if name is not None else set()
        self.writing, self.waiting = name, None
        if name is not None:
            self._effects.append(Write(name, gasp))

    def _not_written(self, name: Name) -> None:
        if name == self.waiting:
            self.waiting = None
            self._effects.append(Superseded(name))

    def _is_worth_it(self, name: Name) -> bool:
        is_durable = self.published is not None and name.key <= self.published
        return not is_durable and name not in self._gasped

    def _make_room(self, worker: int, mine: list[int], overdue: bool) -> None:
        """Forget one snapshot of those in these slots, if one may go."""
        held = {name: self._slots[n].filled_by for n in mine if (name := self._slots[n].holds)}
        oldest_first = [name for name in reversed(self.whole()[1:]) if name in held]
        last = [name for name in oldest_first if name.nonce == self._together]
        choices = sorted({*oldest_first} - {*last}, key=lambda name: (name == self.waiting, name))
        choices += sorted(
            name
            for name, filler in held.items()
            if not self._snapshots[name].is_full and (overdue or filler != worker)
        )
        if last or self._pinned & {*oldest_first}:  # One of those is there to go on from.
            choices += [name for name in self.whole()[:1] if name in held]
        for name in choices + last:
            if self._may_go(name):
                self._not_written(name)
                self._forget(name)
                return

    def _may_go(self, name: Name) -> bool:
        snapshot = self._snapshots[name]
        return name not in (self.writing, *self._pinned) and not snapshot.readers

    def _give_up_passed(self) -> None:
        """Forget the snapshots that lack the piece of a worker that has kept a later one since."""
        last = [kept for kept in self._workers.values() if kept is not None]
        for name, snapshot in [*self._snapshots.items()]:
            missing = {*range(snapshot.locals)} - {*snapshot.slots}
            if any(local in missing and key > name.key for local, key in last):
                self._forget(name)

    def _give_up_without(self, local: int, last: Key) -> None:
        """Forget the snapshots that lack the piece of a worker that is no more.

        Not those of another round or attempt: successors may come before its end is seen.
        """
        for name, snapshot in [*self._snapshots.items()]:
            is_missing = local < snapshot.locals and local not in snapshot.slots
            if is_missing and name.key.fence == last.fence:
                self._forget(name)

    def _trim(self) -> None:
        """Forget whole snapshots beyond those that are held, and those that are spoiled."""
        held = [*self.whole()[:WHOLE_MAX], self.waiting]
        for name, snapshot in [*self._snapshots.items()]:
            is_held = name in held or (snapshot.is_whole and name.nonce == self._together)
            if snapshot.is_full and not is_held and self._may_go(name):
                self._forget(name)

    def _forget(self, name: Name) -> None:
        for slot in self._snapshots.pop(name).slots.values():
            self._slots[slot].holds = None
        self._gasped.discard(name)
        self._effects.append(Forget(name))
        self._drop_unused(lambda slot: slot.retired)

    def _drop_unused(self, kind: Callable[[_Slot], bool]) -> None:
        """Drop what holds nothing and is of no worker, or retired, of this kind."""
        for number, slot in [*self._slots.items()]:
            unowned = slot.retired or slot.owner not in self._workers
            if unowned and not slot.granted and slot.holds is None and kind(slot):
                del self._slots[number]
                self._effects.append(Drop(number))
