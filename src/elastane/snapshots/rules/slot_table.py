"""The slot table: which slot is filled next, which snapshot is whole, which one is written.

Pure: slots and workers are numbers, snapshots are names. Each method records one event and returns
its effects, in order. A call that no correct worker makes raises ValueError and changes nothing.

A slot is never granted or dropped while it is part of the newest whole snapshot, of one that is
being written, or of one that a worker reads. With three slots per worker a grant never waits for
storage: one slot is being written, one holds the newest snapshot, one is filled. Replication pins
two more. A fourth slot is enough then: at worst the newest snapshot is removed. The newest is also
removed if the state is sharded and an older snapshot is the last one that all nodes have.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from elastane.protocol.checkpoints import Key

# Whole snapshots that are held besides those that are written or read. The second-newest serves if
# the newest is not whole on another node, or does not match its digest.
WHOLE_MAX = 2


class Name(NamedTuple):
    """Identifies a snapshot on all nodes: its position in training, and a nonce of that save."""

    key: Key
    nonce: str


class Whole(NamedTuple):
    """All local workers have kept their pieces: this snapshot can be read from now on."""

    name: Name


class Write(NamedTuple):
    """Begin to write this snapshot; call `written` when the write has ended, also if it failed.

    `final` marks the final flush: this node writes what it holds because its workers are gone, or
    because an older snapshot lacks the part of a node that is gone.
    """

    name: Name
    final: bool


class Superseded(NamedTuple):
    """This snapshot will not be written: storage was busy until a newer one came."""

    name: Name


class LostSave(NamedTuple):
    """This snapshot was to be written and never will be, since it lacks a worker's piece.

    That worker ended, or it or its replacement kept a newer snapshot first. The other workers of
    this node may be waiting for the write.
    """

    name: Name


class Forget(NamedTuple):
    """This snapshot is not held any more; free everything that belongs to it."""

    name: Name


class Drop(NamedTuple):
    """Free the memory of this slot."""

    slot: int


Effect = Whole | Write | Superseded | LostSave | Forget | Drop


class SnapshotPiece(NamedTuple):
    """One worker's piece of a snapshot of `locals` workers of this node.

    `together` is the last save that all nodes kept, if one node's part is useless alone; else "".
    """

    name: Name
    local: int
    locals: int
    persist: bool
    together: str = ""


@dataclass(slots=True)
class _Slot:
    size_bytes: int
    owner: int  # The worker that fills it, possibly gone.
    filled_by: int = 0
    granted: bool = False
    holds: Name | None = None
    retired: bool = False  # Its owner now uses slots of another size.


@dataclass(slots=True)
class _Snapshot:
    locals: int
    newest_worker: int  # The last worker that had joined when its first piece was kept.
    slots: dict[int, int] = field(default_factory=dict)  # By local rank.
    persist: int = 0  # How many of its pieces came with a request to write it.
    readers: Counter[int] = field(default_factory=Counter)  # Number of reads by worker.
    spoiled: bool = False

    @property
    def is_full(self) -> bool:
        return len(self.slots) == self.locals

    @property
    def is_whole(self) -> bool:
        return self.is_full and not self.spoiled


class _Ending(enum.Enum):
    """Why the final flush is performed: no worker is there, or the server ends."""

    NONE = enum.auto()
    FLUSHING = enum.auto()  # A worker that joins ends it.
    LEAVING = enum.auto()


class SlotTable:
    """The slot table. `writing` is being written, `published` is the newest durable checkpoint."""

    def __init__(self) -> None:
        self._together = ""
        self.writing: Name | None = None
        self.waiting: Name | None = None
        self.published: Key | None = None
        self._slots: dict[int, _Slot] = {}
        self._snapshots: dict[Name, _Snapshot] = {}
        self._workers: dict[int, tuple[int, Key] | None] = {}  # Last local rank and key of each.
        self._ending = _Ending.NONE
        self._flushed: set[Name] = set()
        self._pinned: frozenset[Name] = frozenset()
        self._effects: list[Effect] = []

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is being written or waits for that."""
        return self.writing is None and self.waiting is None

    @property
    def workers(self) -> int:
        """Return the number of connected workers."""
        return len(self._workers)

    def whole(self) -> list[Name]:
        """Return the snapshots that can be read, newest first."""
        return sorted((n for n, s in self._snapshots.items() if s.is_whole), reverse=True)

    def slots_of(self, name: Name) -> dict[int, int]:
        """Return the slots of a snapshot by local rank."""
        return dict(self._snapshots[name].slots)

    def orphaned(self) -> list[Name]:
        """Return the saves that lack a piece which no connected worker will keep, as it seems.

        All that had joined before the save began have kept their pieces of it, or later ones, and
        none is filling a slot. A worker that ended before it had kept any piece in this world is
        not missed otherwise. One that is about to join may still bring it.
        """
        if not self._workers or any(slot.granted for slot in self._slots.values()):
            return []
        return [
            name
            for name, snapshot in self._snapshots.items()
            if snapshot.persist and not snapshot.is_full
            if all(
                last is not None and last[1] >= name.key
                for worker, last in self._workers.items()
                if worker <= snapshot.newest_worker
            )
        ]

    # Events from workers.

    def joined(self, worker: int) -> None:
        """Add a worker, which may keep newer snapshots: the final flush has to wait."""
        self._workers[worker] = None
        if self._ending is _Ending.FLUSHING:
            self._ending = _Ending.NONE

    def own(self, worker: int, size_bytes: int) -> tuple[list[int], list[Effect]]:
        """Return a worker's slots of this size; if it has none, it inherits those of a dead one.

        Slots of another size, its own and dead workers', are dropped once they are not needed.
        """
        owners = sorted({slot.owner for slot in self._slots.values()} - {*self._workers})
        left = (self._owned(owner, size_bytes) for owner in (worker, *owners))
        mine = next(filter(None, left), [])
        for number in mine:
            self._slots[number].owner = worker
        for slot in self._slots.values():
            if slot.owner == worker and slot.size_bytes != size_bytes:
                slot.retired = True
                slot.granted = False
        self._drop_unused(lambda slot: slot.retired or slot.size_bytes != size_bytes)
        return mine, self._take_effects()

    def add(self, worker: int, size_bytes: int, slots: Iterable[int]) -> None:
        """Add new slots of a worker."""
        for number in slots:
            self._slots[number] = _Slot(size_bytes, worker)

    def grant(
        self, worker: int, *, overdue: bool = False, spare: bool = False, together: str = ""
    ) -> tuple[int | None, list[Effect]]:
        """Return the slot that a worker is to fill next, or None if there is none yet.

        To make room, it removes the oldest whole snapshot; else one that waits to be written; else
        an incomplete one (at once if a dead worker kept its piece, otherwise if `overdue`); else
        the newest, if an older one can be restored. `spare` grants only a free slot.
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
        return free, self._take_effects()

    def keep(self, worker: int, slot: int, piece: SnapshotPiece) -> list[Effect]:
        """Record that a worker has filled its granted slot with a piece."""
        held = self._slots.get(slot)
        if held is None or held.owner != worker or not held.granted:
            raise ValueError(f"slot {slot} is not granted to this worker")
        snapshot = self._snapshots.get(piece.name) or _Snapshot(piece.locals, max(self._workers))
        if not 0 <= piece.local < piece.locals or piece.locals != snapshot.locals:
            raise ValueError(f"worker {piece.local} of {piece.locals}, among {snapshot.locals}")
        if piece.local in snapshot.slots:
            raise ValueError(f"worker {piece.local} has kept its piece of this snapshot already")
        self._together = piece.together or self._together
        self._snapshots[piece.name] = snapshot
        snapshot.slots[piece.local] = slot
        snapshot.persist += piece.persist
        held.granted = False
        held.holds = piece.name
        held.filled_by = worker
        self._workers[worker] = (piece.local, piece.name.key)
        if snapshot.is_whole:
            self._completed(piece.name, snapshot)
        self._remove_passed()
        return self._take_effects()

    def read(self, worker: int, count: int | None = None) -> list[Name]:
        """Return the newest whole snapshots, all or `count`, to a reading worker."""
        for name in (names := self.whole()[:count]):
            self._snapshots[name].readers[worker] += 1
        return names

    def reads(self, worker: int) -> bool:
        """Whether a worker has snapshots that it has not released."""
        return any(worker in snapshot.readers for snapshot in self._snapshots.values())

    def release(self, worker: int, name: Name) -> list[Effect]:
        """Record that a worker has read a snapshot; ignores one that it did not read."""
        if name in self._snapshots:
            self._snapshots[name].readers -= Counter([worker])
        self._trim()
        return self._take_effects()

    def gone(self, worker: int) -> list[Effect]:
        """Remove a worker: its granted slot is empty, and the pieces that it kept stay."""
        last = self._workers.pop(worker)
        for slot in self._slots.values():
            slot.granted &= slot.owner != worker
        for snapshot in self._snapshots.values():
            snapshot.readers.pop(worker, None)
        if last is not None:
            self._remove_without(*last)
        self._drop_unused(lambda slot: slot.retired)
        self._trim()
        return self._take_effects()

    # Events from the server.

    def spoil(self, name: Name) -> list[Effect]:
        """Mark a snapshot as damaged, since it differs from its digest: never read or write it."""
        if name in self._snapshots:
            self._snapshots[name].spoiled = True
            self._cancel_write(name)
        self._trim()
        return self._take_effects()

    def give_up(self, name: Name) -> list[Effect]:
        """Forget a save that lacks a piece for good."""
        self._forget(name)
        return self._take_effects()

    def pin(self, names: frozenset[Name]) -> list[Effect]:
        """Keep these snapshots in memory, in place of those of the last call."""
        self._pinned = names
        self._trim()
        return self._take_effects()

    def durable(self, key: Key) -> None:
        """Record that a checkpoint of this key is published."""
        self.published = max(self.published or key, key)

    def written(
        self, name: Name, *, alone: bool = False, instead: Name | None = None
    ) -> list[Effect]:
        """Record that the write of a snapshot has ended, durable or not.

        `alone`: only the other nodes' parts are missing. An older snapshot may be whole on all
        nodes, so the final flush still tries those. `instead`: a whole snapshot to write in its
        place, unless a newer one waits.
        """
        assert name == self.writing, (name, self.writing)
        self.writing = None
        if name in self._flushed and not alone:
            self._flushed |= {older for older in self.whole() if older < name}
        if instead is None or not self._begin_instead(instead):
            self._write_next()
        self._trim()
        return self._take_effects()

    def write_instead(self, name: Name) -> list[Effect]:
        """Write a whole snapshot in place of one that was lost, unless storage is busy."""
        self._begin_instead(name)
        return self._take_effects()

    def flush(self, *, leaving: bool = False) -> list[Effect]:
        """Write the newest snapshot if it is not durable, once each, because the workers are gone.

        `leaving`: the server ends, so failed snapshots are tried once more.
        """
        if leaving and self._ending is not _Ending.LEAVING:
            self._flushed = set()
        if self._ending is not _Ending.LEAVING:
            self._ending = _Ending.LEAVING if leaving else _Ending.FLUSHING
        if self.writing is None:
            self._write_next()
        return self._take_effects()

    # Internal rules.

    def _take_effects(self) -> list[Effect]:
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
        name, final = self.waiting, False
        if name is None and self._ending is not _Ending.NONE:
            name = next((other for other in self.whole() if self._needs_flush(other)), None)
            final = name is not None
            self._flushed |= {name} if name is not None else set()
        self.writing = name
        self.waiting = None
        if name is not None:
            self._effects.append(Write(name, final))

    def _begin_instead(self, name: Name) -> bool:
        """Begin the write of a snapshot that no worker asked for; returns whether it may."""
        if not self.is_idle or not self._needs_flush(name):
            return False
        self._flushed |= {name}
        self.writing = name
        self._effects.append(Write(name, final=True))
        return True

    def _cancel_write(self, name: Name) -> None:
        if name == self.waiting:
            self.waiting = None
            self._effects.append(Superseded(name))

    def _needs_flush(self, name: Name) -> bool:
        is_durable = self.published is not None and name.key <= self.published
        return not is_durable and name not in self._flushed

    def _make_room(self, worker: int, mine: list[int], overdue: bool) -> None:
        """Remove one removable snapshot from these slots, if there is one."""
        held = {name: self._slots[n].filled_by for n in mine if (name := self._slots[n].holds)}
        oldest_first = [name for name in reversed(self.whole()[1:]) if name in held]
        last = [name for name in oldest_first if name.nonce == self._together]
        choices = sorted({*oldest_first} - {*last}, key=lambda name: (name == self.waiting, name))
        choices += sorted(
            name
            for name, filler in held.items()
            if not self._snapshots[name].is_full and (overdue or filler != worker)
        )
        if last or self._pinned & {*oldest_first}:  # One of those can be restored.
            choices += [name for name in self.whole()[:1] if name in held]
        for name in choices + last:
            if self._is_removable(name):
                self._cancel_write(name)
                self._forget(name)
                return

    def _is_removable(self, name: Name) -> bool:
        snapshot = self._snapshots[name]
        return name not in (self.writing, *self._pinned) and not snapshot.readers

    def _remove_passed(self) -> None:
        """Remove snapshots that lack the piece of a worker that has since kept a later one."""
        last = [kept for kept in self._workers.values() if kept is not None]
        for name, snapshot in [*self._snapshots.items()]:
            missing = {*range(snapshot.locals)} - {*snapshot.slots}
            if any(local in missing and key > name.key for local, key in last):
                self._forget(name)

    def _remove_without(self, local: int, last: Key) -> None:
        """Remove snapshots that lack the piece of a dead worker.

        Those of another round or attempt stay: replacements may come before the death is seen.
        """
        for name, snapshot in [*self._snapshots.items()]:
            is_missing = local < snapshot.locals and local not in snapshot.slots
            if is_missing and name.key.fence == last.fence:
                self._forget(name)

    def _trim(self) -> None:
        """Remove whole snapshots that are not held any more, and spoiled ones."""
        held = [*self.whole()[:WHOLE_MAX], self.waiting]
        for name, snapshot in [*self._snapshots.items()]:
            is_held = name in held or (snapshot.is_whole and name.nonce == self._together)
            if snapshot.is_full and not is_held and self._is_removable(name):
                self._forget(name)

    def _forget(self, name: Name) -> None:
        snapshot = self._snapshots.pop(name)
        for slot in snapshot.slots.values():
            self._slots[slot].holds = None
        if snapshot.persist and not snapshot.is_full:
            self._effects.append(LostSave(name))
        self._flushed.discard(name)
        self._effects.append(Forget(name))
        self._drop_unused(lambda slot: slot.retired)

    def _drop_unused(self, kind: Callable[[_Slot], bool]) -> None:
        """Drop the empty slots of dead workers, and retired ones, for which `kind` is true."""
        for number, slot in [*self._slots.items()]:
            unowned = slot.retired or slot.owner not in self._workers
            if unowned and not slot.granted and slot.holds is None and kind(slot):
                del self._slots[number]
                self._effects.append(Drop(number))
