"""The snapshot store: what a snapshot server holds for one group of workers.

Owns the slot table, the memory and the contents, and carries out the table's effects under one
lock. Slow work (allocating, digesting, writing) runs outside the lock on duplicate descriptors, so
that no worker waits for it. It knows no sockets. How it fails: ValueError for a wrong request,
OSError if slots cannot be allocated; a failed write shows in `progress` and in a log line.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from elastane.protocol.checkpoints import Key
from elastane.snapshots.channel import OwnStatusPage
from elastane.snapshots.contents import Contents, Layouts, check_where, merged
from elastane.snapshots.digests import Background, Digests, digest_and_close
from elastane.snapshots.limits import HURRY_S, ORPHANED_S, RETURN_S
from elastane.snapshots.messages import (
    CopiesHeld,
    LayoutFiles,
    Replica,
    ReplicationSettings,
    Slots,
    Snapshot,
    SnapshotDescription,
    SnapshotNews,
    WriteProgress,
    WriteStatus,
    encode,
)
from elastane.snapshots.replication import ReplicaStore, Replicator, ReplicaTransfer
from elastane.snapshots.rules.copy_times import CopyTimes
from elastane.snapshots.rules.slot_table import (
    Drop,
    Effect,
    Forget,
    LostSave,
    Name,
    SlotTable,
    SnapshotPiece,
    Superseded,
    Whole,
    Write,
)
from elastane.snapshots.shared_memory import Source, close_all, duplicates, make_slots
from elastane.snapshots.writer import (
    INCOMPLETE,
    PeerWait,
    SnapshotWriter,
    WriteFailure,
    WriteOrder,
    WriterCallbacks,
    final_flush,
    lacks_other_parts,
    with_copies,
)

_log = logging.getLogger("elastane.snapshots")
# The worker number under which the server itself reads a snapshot to verify it.
_CHECKER = 0
# The share of one processor that computing digests may take.
_DIGEST_SHARE = 0.05
_WITHOUT_PIECE = "a worker of this node ended before it had kept its part"


class SnapshotStore:
    """The store of one group. `wake` is called when a write has ended. Workers count from 1."""

    def __init__(
        self,
        wake: Callable[[], None],
        origin: str = "",
        settings: Callable[[], ReplicationSettings | None] = lambda: None,
        report: Callable[[SnapshotNews], None] = lambda news: None,
    ) -> None:
        self._wake = wake
        self.report = report
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._table = SlotTable()
        self._contents: dict[Name, Contents] = {}
        self._layouts = Layouts()
        self._memory: dict[int, tuple[int, int]] = {}  # Descriptor and size, by slot.
        self._numbered = 0
        self._digests = Digests()
        self._dropped: list[int] = []
        # Without the bound, a save every step of 4 GB would cost half a core for digests.
        self._digester = Background(_DIGEST_SHARE)
        self._background = Background()
        self._writer = SnapshotWriter(
            WriterCallbacks(self._durable, self._superseded, self._written, report)
        )
        self.replicas = ReplicaStore()
        self._replicator = Replicator(origin, settings, self._copied)
        self.status = ServerStatus(self._table, self._writer, self._replicator)
        self._in_memory, self._in_replica, self._in_storage = (CopyTimes() for _ in range(3))
        self._stored: tuple[Name, ...] = ()  # the newest durable one, if any
        self._lost: Name | None = None  # the newest save that lacks a piece for good
        self._held = CopiesHeld()
        self._alone_since_s = time.monotonic()
        self._is_flushed = self._is_leaving = False
        self._seen = (0, 0)  # The latest round and attempt of the workers.

    def open(self) -> None:
        """Start the background threads."""
        self._digester.start()
        self._background.start()

    # Requests of workers.

    def joined(self, worker: int) -> None:
        """Add a worker."""
        with self._lock:
            self._table.joined(worker)
            self._is_flushed = False

    def gone(self, worker: int) -> None:
        """Remove a worker."""
        with self._lock:
            # It may have written anywhere in its last moments.
            self._digests.worker_ended()
            self._alone_since_s = time.monotonic()
            self._carry_out(self._table.gone(worker))
            is_orphaned = bool(self._table.orphaned())
        self._free_dropped()
        if is_orphaned:
            self._wake()

    def check_ahead(self) -> None:
        """Verify the newest snapshot before new workers ask for it, if all workers are gone."""
        if not (self._table.workers or self._is_leaving):
            with self._checking:
                self._verify_newest()

    def slots(self, worker: int, wish: Slots) -> tuple[tuple[int, ...], list[int]]:
        """Return the numbers of a worker's slots, with a new descriptor for each."""
        with self._lock:
            mine, effects = self._table.own(worker, wish.slot_bytes)
            self._carry_out(effects)
        self._free_dropped(now=True)
        made = self._make_slots(wish.count - len(mine), wish.slot_bytes)
        with self._lock:
            numbers = [self._numbered + index for index in range(len(made))]
            self._numbered += len(made)
            self._memory |= {n: (fd, wish.slot_bytes) for n, fd in zip(numbers, made, strict=True)}
            self._table.add(worker, wish.slot_bytes, numbers)
            return (*mine, *numbers), duplicates(self._memory[n][0] for n in (*mine, *numbers))

    def _make_slots(self, count: int, size_bytes: int) -> list[int]:
        try:
            return make_slots(count, size_bytes)
        except OSError:
            # A worker's own slots are more important than replicas: free those and try again.
            with self._lock:
                self._replicator.table.unpin()
                self._carry_out(self._table.pin(self._replicator.table.pinned))
            self.replicas.clear()
            self._free_dropped(now=True)
            return make_slots(count, size_bytes)

    def grant(
        self, worker: int, *, overdue: bool = False, spare: bool = False, together: str = ""
    ) -> int | None:
        """Return the slot to fill next, or None if there is none yet; `spare`: a free one only."""
        with self._lock:
            slot, effects = self._table.grant(
                worker, overdue=overdue, spare=spare, together=together
            )
            self._carry_out(effects)
        self._free_dropped()
        return slot

    def add_layout(self, layout: LayoutFiles) -> None:
        """Store the files that later snapshots name by their digest."""
        if layout.final_flush is not None:
            check_where(layout.final_flush)
        with self._lock:
            self._layouts.add(layout)
            self._layouts.trim({d for c in self._contents.values() for d in c.layouts})

    def keep(self, worker: int, slot: int, piece: Snapshot) -> None:
        """Record the piece that a worker has put into its slot."""
        name = Name(piece.key, piece.nonce)
        with self._lock:
            contents = self._contents.get(name) or Contents()
            contents.check(piece, self._layouts)
            if slot not in self._memory or piece.end - piece.first > self._memory[slot][1]:
                raise ValueError(f"slot {slot} does not hold {piece.end - piece.first} bytes")
            wanted = piece.persist is not None
            entry = SnapshotPiece(name, piece.local, piece.locals, wanted, piece.together)
            effects = self._table.keep(worker, slot, entry)
            contents.add(piece, time.monotonic())
            self._contents[name] = contents
            self._seen = max(self._seen, name.key.fence[1:])
            self._carry_out(effects)
            is_orphaned = bool(self._table.orphaned())
        self._free_dropped()
        if is_orphaned:
            self._wake()

    def progress(self, fence: tuple[int, int] = (0, 0)) -> WriteProgress:
        """Return the status of writes to a worker of this round and attempt."""
        with self._lock:
            self._seen = max(self._seen, fence)
            return self.status.now()

    def read(self, worker: int) -> tuple[list[SnapshotDescription], list[int]]:
        """Return all whole snapshots and replicas with descriptors, to be read until `release`."""
        with self._checking:
            self._verify_newest()
        with self._lock:
            names = self._table.read(worker)
            slots = [slot for name in names for slot in self._slots(name)]
            try:
                descriptors = iter(duplicates(self._memory[slot][0] for slot in slots))
            except OSError:
                for name in names:
                    self._carry_out(self._table.release(worker, name))
                raise
            words = [self._words(name) for name in names]
        own = [(each, [next(descriptors) for _ in each.pieces]) for each in words]
        return merged([*own, *self.replicas.given()])

    def reads(self, worker: int) -> bool:
        """Whether a worker has snapshots that it has not released."""
        with self._lock:
            return self._table.reads(worker)

    def release(self, worker: int, name: Name) -> None:
        """Record that a worker has read a snapshot."""
        with self._lock:
            self._carry_out(self._table.release(worker, name))
        self._free_dropped()

    # Calls of the server's process.

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is being written or waits for that."""
        with self._lock:
            return self._table.is_idle

    def flush_if_alone(self) -> float | None:
        """Perform the final flush if no worker returned; returns the seconds to the next call."""
        with self._lock:
            if self._table.workers or self._is_flushed:
                return None
            if (left_s := self._alone_since_s + RETURN_S - time.monotonic()) > 0:
                return left_s
            self._is_flushed = True
            self._carry_out(self._table.flush())
        self._free_dropped()
        return None

    def end_orphaned(self) -> float | None:
        """End the waits for saves that no worker completes; returns the seconds to the next call.

        The other workers of the node wait for them, and may make no later save.
        """
        with self._lock:
            now_s, looks = time.monotonic(), list[float]()
            for name in self._table.orphaned():
                left_s = self._contents[name].kept_s + ORPHANED_S - now_s
                if left_s > 0:
                    looks.append(left_s)
                else:
                    self._carry_out(self._table.give_up(name))
        self._free_dropped()
        return min(looks, default=None)

    def leave(self) -> None:
        """Perform the final flush: no worker will connect again."""
        with self._lock:
            self._is_leaving = True
            self._carry_out(self._table.flush(leaving=True))
        self._free_dropped()

    def stop(self) -> None:
        """Cancel the current write."""
        self._writer.stopping.set()

    # Internal. The caller holds the lock unless a docstring says otherwise.

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        left = deque(effects)
        while left:
            match left.popleft():
                case Whole(name):
                    began_s = self._contents[name].began_s
                    self._in_memory.add(name, began_s, time.monotonic() - began_s)
                    self._digester.submit(functools.partial(self._digest, name))
                    left.extend(self._copy(name))
                    left.extend(self._replace_lost())
                case Write(name, final):
                    left.extend(self._begin(name, final=final))
                case Superseded(name):
                    reason = "storage was busy with an older one, and a newer one took its place"
                    self._writer.fail(name.key, WriteFailure(reason, slug="checkpoint-busy"))
                case LostSave(name):
                    self._lost = max(name, self._lost or name)
                    self._writer.record(name.key, WriteFailure(_WITHOUT_PIECE, slug=INCOMPLETE))
                case Forget(name):
                    del self._contents[name]
                    self._digests.forget(name)
                case Drop(slot):
                    self._dropped.append(self._memory.pop(slot)[0])
        self._digests.set_newest(next(iter(self._table.whole()), None))
        self.status.update()
        self._report_copies()

    def _report_copies(self) -> None:
        """Report the newest copies if they have changed."""
        whole = self._table.whole()
        held = CopiesHeld(
            memory=self._in_memory.newest(whole),
            replica=self._in_replica.newest(self._replicator.table.there),
            storage=self._in_storage.newest(self._stored),
            replicated=not whole or self._contents[whole[0]].first.replicated,
        )
        if held != self._held:
            self._held = held
            self.report(held)

    def _begin(self, name: Name, *, final: bool) -> list[Effect]:
        """Start a write; returns the effects of its end if it cannot be started."""
        order = None
        try:
            order = self._order(name, final=final)
            if order is not None:
                self._writer.begin(order, final=final, known=self._digests.of(name))
                return []
        except (ValueError, OSError, RuntimeError) as error:
            self._writer.fail(name.key, WriteFailure(str(error), slug="checkpoint-write"))
            close_all(order.slots if order is not None else ())
        return self._table.written(name)

    def _order(self, name: Name, *, final: bool) -> WriteOrder | None:
        """Return the write order, or None if no destination is known."""
        contents = self._contents[name]
        persist = contents.flush_request(self._layouts) if final else contents.persist()
        if persist is None:
            return None
        throttle = PeerWait(self._writer.stopping, functools.partial(self._hurries, name))
        order = WriteOrder(
            name=name,
            began_s=contents.began_s,
            persist=final_flush(persist, HURRY_S) if final else persist,
            sources=self._sources(name),
            files=contents.files(self._layouts),
            streams=contents.streams(),
            stop=self._writer.stopping.is_set,
            hurry=throttle.ended,
            is_past=functools.partial(self._is_past, name),
        )
        return with_copies(order, self.replicas.given(name)) if final else order

    def _hurries(self, name: Name) -> bool:
        """Whether not to wait long for other nodes, which may be dead; without the lock."""
        return self._is_leaving or self._is_past(name)

    def _is_past(self, name: Name) -> bool:
        """Whether workers are in a later round or have kept a newer snapshot; without the lock."""
        with self._lock:
            return self._seen > name.key.fence[1:] or self._table.waiting is not None

    def _durable(self, order: WriteOrder) -> None:
        """Record a durable checkpoint; called by the writing thread, without the lock."""
        with self._lock:
            self._table.durable(order.name.key)
            self._stored = (max((order.name, *self._stored)),)
            self._in_storage.add(order.name, order.began_s, self._writer.last[0])
            self.status.update()
            self._report_copies()

    def _superseded(self, order: WriteOrder, newer: Key) -> None:
        """Record that a later round has published, if the workers here are in that round.

        They continue from the state of the snapshot, so what is published is newer than it. Workers
        of an earlier round were replaced: their save is lost. Called by the writing thread.
        """
        with self._lock:
            if newer.era == order.name.key.era and newer.fence[1:] <= self._seen:
                self._table.durable(newer)
                self.status.update()

    def _written(self, order: WriteOrder, failure: WriteFailure | None) -> None:
        """Handle the end of a write; called by the writing thread, without the lock."""
        if failure is not None and failure.slug == "snapshot-changed":
            self._spoil(order.name)
        with self._lock:
            alone = lacks_other_parts(failure)
            instead = self._instead_of(order.name) if alone else None
            self._carry_out(self._table.written(order.name, alone=alone, instead=instead))
            self._carry_out(self._replace_lost())
        self._free_dropped()
        self._wake()

    def _instead_of(self, lost: Name) -> Name | None:
        """Return the newest snapshot of a later world.

        A node that was lost with its part of a save does not write it, and the workers may not save
        again, as at the end of training. Of a sharded state the servers of all nodes decide so for
        the same save, and each writes its part.
        """
        newest = next(iter(self._table.whole()), None)
        if newest is None or newest.key.fence <= lost.key.fence:
            return None
        request = self._contents[newest].flush_request(self._layouts)
        return newest if request is not None else None

    def _replace_lost(self) -> list[Effect]:
        """Begin to write the newest snapshot of a later world in place of a save lost here.

        Workers of this node wait for that save, and may end without another one. Meanwhile the
        servers of other nodes are busy: they wait for this node's part.
        """
        if self._lost is None:
            return []
        published = self._table.published
        if published is not None and published >= self._lost.key:
            self._lost = None
            return []
        instead = self._instead_of(self._lost)
        return [] if instead is None else self._table.write_instead(instead)

    def _slots(self, name: Name) -> list[int]:
        """Return the slots of a snapshot in the order of local ranks."""
        return [slot for _, slot in sorted(self._table.slots_of(name).items())]

    def _sources(self, name: Name) -> tuple[Source, ...]:
        """Return the sources of a snapshot, whose descriptors the caller closes."""
        pieces = [piece for _, piece in sorted(self._contents[name].pieces.items())]
        descriptors = duplicates(self._memory[slot][0] for slot in self._slots(name))
        return tuple(
            Source(piece.first, piece.end, fd)
            for piece, fd in zip(pieces, descriptors, strict=True)
        )

    def _words(self, name: Name) -> SnapshotDescription:
        return self._contents[name].words(self._layouts, verified=self._digests.is_checked(name))

    def _copy(self, name: Name) -> list[Effect]:
        """Send a replica of a whole snapshot to another node, if its workers asked for one."""
        if name not in self._contents or name not in self._table.whole():
            return []
        replica = self._contents[name].first.replica
        if replica is None:
            self._replicator.stop()
            self.replicas.clear()
        else:
            self._replicator.begin(name, replica, self._table.whole(), self._transfer)
        return self._table.pin(self._replicator.table.pinned)

    def _transfer(self, name: Name, replica: Replica) -> ReplicaTransfer:
        words, known = self._words(name), self._digests.of(name)
        return ReplicaTransfer(name, replica, words, self._sources(name), known)

    def _copied(self, name: Name, arrived: bool) -> None:
        """Handle the end of a transfer; called by its thread, without the lock."""
        with self._lock:
            if arrived and name in self._contents:
                began_s = self._contents[name].began_s
                self._in_replica.add(name, began_s, time.monotonic() - began_s)
            self._replicator.table.ended(name, arrived=arrived)
            self._carry_out(self._table.pin(self._replicator.table.pinned))
        self._free_dropped()

    def _digest(self, name: Name) -> None:
        """Compute the digest of a snapshot while it is the newest; without the lock."""
        with self._lock:
            if name != self._digests.newest:
                return
            sources = self._sources(name)
        digests = digest_and_close(sources, lambda: name == self._digests.newest)
        with self._lock:
            # The snapshot is gone if its slots were granted meanwhile.
            if digests is not None and name in self._contents:
                self._digests.add(name, digests)

    def _verify_newest(self) -> None:
        """Compare the newest snapshot with its digest until one matches; without the lock."""
        while True:
            with self._lock:
                doubt = self._digests.doubt()
                if doubt is None:
                    return
                self._table.read(_CHECKER, 1)
                sources = self._sources(doubt.name)
            # Workers are waiting for this, so a second processor is idle.
            is_sound = digest_and_close(sources, lambda: True, threads=2) == doubt.known
            with self._lock:
                self._carry_out(self._table.release(_CHECKER, doubt.name))
                if is_sound:
                    self._digests.passed(doubt)
            if not is_sound:
                self._spoil(doubt.name)

    def _spoil(self, name: Name) -> None:
        """Withdraw a changed snapshot; without the lock."""
        line = "the snapshot of step %d changed in memory after it was kept: it is not used [%s]"
        _log.error(line, name.key.step, "snapshot-changed")
        with self._lock:
            self._carry_out(self._table.spoil(name))
        self._free_dropped()

    def _free_dropped(self, *, now: bool = False) -> None:
        """Close dropped slots, in the background unless `now`; without the lock."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        if now:
            close_all(dropped)
        elif dropped:
            self._background.submit(functools.partial(close_all, dropped))


class ServerStatus:
    """The status of one store, under whose lock it is used; `page` holds it as `WriteStatus`."""

    def __init__(self, table: SlotTable, writer: SnapshotWriter, replicator: Replicator) -> None:
        self._table = table
        self._writer = writer
        self._replicator = replicator
        self.page = OwnStatusPage()
        self._last: WriteProgress | None = None
        self.update()

    def now(self) -> WriteProgress:
        """Return the current status."""
        return WriteProgress(
            writing=self._table.writing.key if self._table.writing else None,
            waiting=self._table.waiting.key if self._table.waiting else None,
            published=self._table.published,
            failures=self._writer.failures,
            last_write_s=self._writer.last[0],
            copying=self._replicator.table.copying is not None,
            copied=self._replicator.copied,
        )

    def update(self) -> None:
        """Update the page if the status has changed; called after anything that may change it."""
        now = self.now()
        if now != self._last:
            self._last = now
            self.page.write(encode(WriteStatus(now)))
