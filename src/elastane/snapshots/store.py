"""What a keeper holds for one group of workers, and what is done with it.

Owns the books, the slots and the contents, and carries out what the books say, under their lock.
Whatever takes time, making slots, digests, writing, is done outside of the lock, on descriptors of
its own, so that no worker waits for it. Knows no sockets. How it fails: ValueError for what no
worker should ask, OSError for slots; what goes wrong with the writing is told by `progress`, and by
a line of log.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import KEEPER_HURRY_S, KEEPER_RETURN_S
from elastane.snapshots.background import Background
from elastane.snapshots.contents import Contents, Layouts, check_where, merged
from elastane.snapshots.digests import Digests, taken
from elastane.snapshots.events import News
from elastane.snapshots.messages import (
    HeldWords,
    LayoutFiles,
    Replica,
    Slots,
    Snapshot,
    WriteProgress,
)
from elastane.snapshots.peers import Neighbours
from elastane.snapshots.replica_store import Neighbour
from elastane.snapshots.replicator import Courier, Errand
from elastane.snapshots.rules.snapshots import (
    Drop,
    Effect,
    Forget,
    Name,
    SnapshotPiece,
    Snapshots,
    Superseded,
    Whole,
    Write,
)
from elastane.snapshots.shared_memory import close_all, duplicates, make_slots
from elastane.snapshots.status import ServerStatus
from elastane.snapshots.writer import Heard, Scribe, WriteThrottle, is_others
from elastane.snapshots.writing import Source, WriteFailure, WriteOrder, last_gasp, with_copies

_log = logging.getLogger("elastane.snapshots")
# The reader that is no worker: who compares digests.
_CHECKER = 0
# Of the time of one processor, that digests may take.
_DIGEST_SHARE = 0.05


class Shelf:
    """One group's. `wake` is called when a writing has ended; workers have numbers from 1."""

    def __init__(
        self,
        wake: Callable[[], None],
        origin: str = "",
        neighbours: Callable[[], Neighbours | None] = lambda: None,
        tell: Callable[[News], None] = lambda news: None,
    ) -> None:
        self._wake, self.tell = wake, tell
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._books = Snapshots()
        self._contents: dict[Name, Contents] = {}
        self._layouts = Layouts()
        self._memory: dict[int, tuple[int, int]] = {}  # descriptor and size, by slot
        self._numbered = 0
        self._digests = Digests()
        self._dropped: list[int] = []
        # A snapshot a step would else have all of them read: half a core for 4 GB.
        self._digester, self._background = Background(_DIGEST_SHARE), Background()
        self._scribe = Scribe(Heard(self._durable, self._written, tell))
        self.neighbour = Neighbour()
        self._courier = Courier(origin, neighbours, self._copied)
        self.standing = ServerStatus(self._books, self._scribe, self._courier)
        self._alone_since_s = time.monotonic()
        self._is_missed = self._is_leaving = False
        self._seen = (0, 0)  # the latest round and attempt of the workers

    def open(self) -> None:
        """Start what works in the background."""
        self._digester.start()
        self._background.start()

    # What workers ask.

    def came(self, worker: int) -> None:
        """A worker is there."""
        with self._lock:
            self._books.came(worker)
            self._is_missed = False

    def gone(self, worker: int) -> None:
        """A worker is no more."""
        with self._lock:
            # It may have written anywhere in its last moments.
            self._digests.ended()
            self._alone_since_s = time.monotonic()
            self._carry_out(self._books.gone(worker))
        self._let_go()

    def check_ahead(self) -> None:
        """Check the newest, where all workers are gone, before their successors ask for it."""
        if not (self._books.workers or self._is_leaving):
            with self._checking:
                self._check_newest()

    def slots(self, worker: int, wish: Slots) -> tuple[tuple[int, ...], list[int]]:
        """Return the numbers of a worker's slots, and a new descriptor of each."""
        with self._lock:
            mine, effects = self._books.own(worker, wish.slot_bytes)
            self._carry_out(effects)
        self._let_go(now=True)
        made = self._made(wish.count - len(mine), wish.slot_bytes)
        with self._lock:
            numbers = [self._numbered + index for index in range(len(made))]
            self._numbered += len(made)
            self._memory |= {n: (fd, wish.slot_bytes) for n, fd in zip(numbers, made, strict=True)}
            self._books.add(worker, wish.slot_bytes, numbers)
            return (*mine, *numbers), duplicates(self._memory[n][0] for n in (*mine, *numbers))

    def _made(self, count: int, size_bytes: int) -> list[int]:
        try:
            return make_slots(count, size_bytes)
        except OSError:
            # What stays for copies' sake has to go before what a worker needs.
            with self._lock:
                self._courier.books.unpin()
                self._carry_out(self._books.pin(self._courier.books.pinned))
            self.neighbour.over()
            self._let_go(now=True)
            return make_slots(count, size_bytes)

    def grant(
        self, worker: int, *, overdue: bool = False, spare: bool = False, together: str = ""
    ) -> int | None:
        """Return the slot to fill; None: not yet. `spare`: one for which nothing has to go."""
        with self._lock:
            slot, effects = self._books.grant(
                worker, overdue=overdue, spare=spare, together=together
            )
            self._carry_out(effects)
        self._let_go()
        return slot

    def layout(self, layout: LayoutFiles) -> None:
        """Take in what snapshots will refer to."""
        if layout.gasp is not None:
            check_where(layout.gasp)
        with self._lock:
            self._layouts.add(layout)
            self._layouts.trim({d for c in self._contents.values() for d in c.layouts})

    def keep(self, worker: int, slot: int, piece: Snapshot) -> None:
        """Take in what a worker has put into its slot."""
        name = Name(piece.key, piece.nonce)
        with self._lock:
            contents = self._contents.get(name) or Contents()
            contents.check(piece, self._layouts)
            if slot not in self._memory or piece.end - piece.first > self._memory[slot][1]:
                raise ValueError(f"slot {slot} does not hold {piece.end - piece.first} bytes")
            wanted = piece.persist is not None
            told = SnapshotPiece(name, piece.local, piece.locals, wanted, piece.together)
            effects = self._books.keep(worker, slot, told)
            contents.pieces[piece.local], self._contents[name] = piece, contents
            self._seen = max(self._seen, name.key.fence[1:])
            self._carry_out(effects)
        self._let_go()

    def progress(self, fence: tuple[int, int] = (0, 0)) -> WriteProgress:
        """Return how the writing stands, to a worker of this round and attempt."""
        with self._lock:
            self._seen = max(self._seen, fence)
            return self.standing.now()

    def read(self, worker: int) -> tuple[list[HeldWords], list[int]]:
        """Return what is whole here, and parts of others', and descriptors, until `release`."""
        with self._checking:
            self._check_newest()
        with self._lock:
            names = self._books.read(worker)
            slots = [slot for name in names for slot in self._slots(name)]
            try:
                descriptors = iter(duplicates(self._memory[slot][0] for slot in slots))
            except OSError:
                for name in names:
                    self._carry_out(self._books.release(worker, name))
                raise
            words = [self._words(name) for name in names]
        own = [(each, [next(descriptors) for _ in each.pieces]) for each in words]
        return merged([*own, *self.neighbour.given()])

    def reads(self, worker: int) -> bool:
        """Whether a worker has not released what it was given."""
        with self._lock:
            return self._books.reads(worker)

    def release(self, worker: int, name: Name) -> None:
        """A worker has read a snapshot."""
        with self._lock:
            self._carry_out(self._books.release(worker, name))
        self._let_go()

    # What the keeper's process asks.

    @property
    def is_idle(self) -> bool:
        """Whether nothing is written or waits for it."""
        with self._lock:
            return self._books.is_idle

    def look(self) -> float | None:
        """Have the newest snapshot written if the workers do not come back; when to look again."""
        with self._lock:
            if self._books.workers or self._is_missed:
                return None
            if (left_s := self._alone_since_s + KEEPER_RETURN_S - time.monotonic()) > 0:
                return left_s
            self._is_missed = True
            self._carry_out(self._books.gasp())
        self._let_go()
        return None

    def leave(self) -> None:
        """Have the newest snapshot written: nobody comes any more."""
        with self._lock:
            self._is_leaving = True
            self._carry_out(self._books.gasp(leaving=True))
        self._let_go()

    def stop(self) -> None:
        """Give up what is being written."""
        self._scribe.stopping.set()

    # Inside; the lock is held where nothing else is said.

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        left = deque(effects)
        while left:
            match left.popleft():
                case Whole(name):
                    self._digester.do(functools.partial(self._digest, name))
                    left.extend(self._copy(name))
                case Write(name, gasp):
                    left.extend(self._begin(name, gasp=gasp))
                case Superseded(name):
                    reason = "storage was busy with an older one, and a newer one took its place"
                    self._scribe.fail(name.key, WriteFailure(reason, slug="checkpoint-busy"))
                case Forget(name):
                    del self._contents[name]
                    self._digests.forget(name)
                case Drop(slot):
                    self._dropped.append(self._memory.pop(slot)[0])
        self._digests.newest = next(iter(self._books.whole()), None)
        self.standing.look()

    def _begin(self, name: Name, *, gasp: bool) -> list[Effect]:
        """Start the writing; return what follows where it cannot be started."""
        order = None
        try:
            order = self._order(name, gasp=gasp)
            if order is not None:
                self._scribe.begin(order, gasp=gasp, known=self._digests.of(name))
                return []
        except (ValueError, OSError, RuntimeError) as error:
            self._scribe.fail(name.key, WriteFailure(str(error), slug="checkpoint-write"))
            close_all(order.slots if order is not None else ())
        return self._books.written(name)

    def _order(self, name: Name, *, gasp: bool) -> WriteOrder | None:
        """Return what is to be written; None where nobody has said where to."""
        contents = self._contents[name]
        persist = contents.gasp(self._layouts) if gasp else contents.persist()
        if persist is None:
            return None
        patience = WriteThrottle(self._scribe.stopping, functools.partial(self._hurries, name))
        order = WriteOrder(
            name=name,
            persist=last_gasp(persist, KEEPER_HURRY_S) if gasp else persist,
            sources=self._sources(name),
            files=contents.files(self._layouts),
            streams=contents.streams(),
            stop=self._scribe.stopping.is_set,
            hurry=patience.ended,
            is_past=functools.partial(self._is_past, name),
        )
        return with_copies(order, self.neighbour.given(name)) if gasp else order

    def _hurries(self, name: Name) -> bool:
        """Whether not to wait long: in a later round, the others may be dead; without the lock."""
        return self._is_leaving or self._is_past(name)

    def _is_past(self, name: Name) -> bool:
        """Whether workers are of a later round, or have kept what is to be written after this."""
        with self._lock:
            return self._seen > name.key.fence[1:] or self._books.waiting is not None

    def _durable(self, key: Key) -> None:
        """A key is durable; in the thread that writes."""
        with self._lock:
            self._books.durable(key)
            self.standing.look()

    def _written(self, order: WriteOrder, failure: WriteFailure | None) -> None:
        """A writing has ended; in the thread that wrote."""
        if failure is not None and failure.slug == "snapshot-changed":
            self._spoil(order.name)
        with self._lock:
            self._carry_out(self._books.written(order.name, alone=is_others(failure)))
        self._let_go()
        self._wake()

    def _slots(self, name: Name) -> list[int]:
        """Return the slots of a snapshot, in the order of the workers that filled them."""
        return [slot for _, slot in sorted(self._books.slots_of(name).items())]

    def _sources(self, name: Name) -> tuple[Source, ...]:
        """Return what a snapshot is in, by descriptors that the caller closes."""
        pieces = [piece for _, piece in sorted(self._contents[name].pieces.items())]
        descriptors = duplicates(self._memory[slot][0] for slot in self._slots(name))
        return tuple(
            Source(piece.first, piece.end, fd)
            for piece, fd in zip(pieces, descriptors, strict=True)
        )

    def _words(self, name: Name) -> HeldWords:
        return self._contents[name].words(self._layouts, verified=self._digests.is_checked(name))

    def _copy(self, name: Name) -> list[Effect]:
        """Have a whole snapshot copied to another node, where that is wished."""
        if name not in self._contents or name not in self._books.whole():
            return []
        replica = self._contents[name].first.replica
        if replica is None:
            self._courier.over()
            self.neighbour.over()
        else:
            self._courier.begin(name, replica, self._books.whole(), self._errand)
        return self._books.pin(self._courier.books.pinned)

    def _errand(self, name: Name, replica: Replica) -> Errand:
        words, known = self._words(name), self._digests.of(name)
        return Errand(name, replica, words, self._sources(name), known)

    def _copied(self, name: Name, arrived: bool) -> None:
        """A copying has ended; in the thread that copied."""
        with self._lock:
            self._courier.books.ended(name, arrived=arrived)
            self._carry_out(self._books.pin(self._courier.books.pinned))
        self._let_go()

    def _digest(self, name: Name) -> None:
        """Take the digest of a snapshot, while it is the newest; the lock is not held."""
        with self._lock:
            if name != self._digests.newest:
                return
            sources = self._sources(name)
        digests = taken(sources, lambda: name == self._digests.newest)
        with self._lock:
            # Where its slots were granted meanwhile, it is not there any more.
            if digests is not None and name in self._contents:
                self._digests.add(name, digests)

    def _check_newest(self) -> None:
        """Compare the newest snapshot with its digest, until one passes; the lock is not held."""
        while True:
            with self._lock:
                doubt = self._digests.doubt()
                if doubt is None:
                    return
                self._books.read(_CHECKER, 1)
                sources = self._sources(doubt.name)
            # The workers wait for this, so there is a processor more.
            is_sound = taken(sources, lambda: True, threads=2) == doubt.known
            with self._lock:
                self._carry_out(self._books.release(_CHECKER, doubt.name))
                if is_sound:
                    self._digests.passed(doubt)
            if not is_sound:
                self._spoil(doubt.name)

    def _spoil(self, name: Name) -> None:
        """Give a snapshot to nobody any more; the lock is not held."""
        line = "the snapshot of step %d changed in memory after it was kept: it is not used [%s]"
        _log.error(line, name.key.step, "snapshot-changed")
        with self._lock:
            self._carry_out(self._books.spoil(name))
        self._let_go()

    def _let_go(self, *, now: bool = False) -> None:
        """Close what was dropped, by and by unless `now`; the lock is not held."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        if now:
            close_all(dropped)
        elif dropped:
            self._background.do(functools.partial(close_all, dropped))
