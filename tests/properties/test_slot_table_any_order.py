"""The slot table of a snapshot server keeps complete snapshots, in any order of events.

The test has a model of the content of each slot: a grant makes it garbage, a keep makes it a piece.
Each piece that the slot table grants, writes or reads must be in the model.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.slot_table import (
    WHOLE_MAX,
    Drop,
    Forget,
    LostSave,
    Name,
    SlotTable,
    SnapshotPiece,
    Superseded,
    Whole,
    Write,
)

SIZES = (1, 2)
SLOTS = 3


class Books(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = SlotTable()
        self.memory = {}  # slot -> (name, local), "garbage" or None
        self.slots = {}  # worker -> its slots
        self.local = {}  # worker -> its local
        self.locals = 1
        self.granted = {}  # worker -> slot
        self.at = {}  # worker -> how many snapshots it has kept in this round
        self.round = 0
        self.read = []  # (worker, name)
        self.asked, self.settled = set(), set()
        self.newest = None
        self.writing = None
        self.spoiled = set()
        self.numbered = 0

    # Events.

    @rule(locals_=st.integers(1, 3))
    def a_round_begins(self, locals_):
        """Replace all workers, or continue them with other ranks."""
        self.round, self.locals = self.round + 1, locals_
        for worker in [*self.local][locals_:]:
            self.end(worker)
        for worker in range(self.numbered + 1, self.numbered + 1 + locals_ - len(self.local)):
            self.numbered = worker
            self.table.joined(worker)
            self.local[worker] = 0
        self.local = {worker: local for local, worker in enumerate(self.local)}
        self.at = dict.fromkeys(self.local, 0)

    @precondition(lambda self: self.local)
    @rule(data=st.data(), size=st.sampled_from(SIZES), count=st.integers(1, SLOTS))
    def slots_are_asked_for(self, data, size, count):
        worker = data.draw(st.sampled_from([*self.local]))
        mine, effects = self.table.own(worker, size)
        self.seen(effects)
        if self.granted.get(worker) not in mine:
            self.granted.pop(worker, None)
        start = max(self.memory, default=0) + 1
        new = [*range(start, start + max(0, count - len(mine)))]
        self.memory |= dict.fromkeys(new)
        self.table.add(worker, size, new)
        self.slots[worker] = [*mine, *new]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), overdue=st.booleans())
    def a_slot_is_granted(self, data, overdue):
        worker = data.draw(st.sampled_from([*self.slots]))
        before = self.granted.get(worker)
        slot, effects = self.table.grant(worker, overdue=overdue)
        self.seen(effects)
        if overdue and len(self.slots[worker]) >= SLOTS and not self.read:
            assert slot is not None, "a grant waits, though three slots are enough"
        if slot is not None:
            assert slot in self.slots[worker]
            assert before in (None, slot), "a second request before the keep got another slot"
            self.granted[worker] = slot
            self.memory[slot] = "garbage"

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), persist=st.booleans(), nonce=st.sampled_from(["a", "b"]))
    def a_piece_is_kept(self, data, persist, nonce):
        worker = data.draw(st.sampled_from([*self.granted]))
        self.at[worker] += 1
        name = Name(Key(0, self.round, 0, self.at[worker]), nonce)
        slot, local = self.granted.pop(worker), self.local[worker]
        self.memory[slot] = (name, local)
        effects = self.table.keep(worker, slot, SnapshotPiece(name, local, self.locals, persist))
        self.seen(effects)

    @precondition(lambda self: self.local)
    @rule(data=st.data())
    def a_worker_dies(self, data):
        self.end(data.draw(st.sampled_from([*self.local])))

    @precondition(lambda self: self.local)
    @rule(data=st.data(), count=st.sampled_from([None, 1]))
    def a_worker_reads(self, data, count):
        worker = data.draw(st.sampled_from([*self.local]))
        names = self.table.read(worker, count)
        assert names == self.table.whole()[:count]
        self.read += [(worker, name) for name in names]

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def a_worker_has_read(self, data):
        one = data.draw(st.sampled_from(self.read))
        self.read.remove(one)
        self.seen(self.table.release(*one))

    @precondition(lambda self: self.writing)
    @rule(durable=st.booleans())
    def a_writing_ends(self, durable):
        name, self.writing = self.writing, None
        if durable:
            self.table.durable(name.key)
        self.settled.add(name)
        self.seen(self.table.written(name))

    @rule(leaving=st.sampled_from([False, False, True]))
    def the_workers_are_missed(self, leaving):
        self.seen(self.table.flush(leaving=leaving))

    @precondition(lambda self: self.table.whole())
    @rule(data=st.data())
    def memory_decays(self, data):
        name = data.draw(st.sampled_from(self.table.whole()))
        self.spoiled.add(name)
        self.newest = None
        self.seen(self.table.spoil(name))

    # Consequences.

    def end(self, worker):
        self.read = [(reader, name) for reader, name in self.read if reader != worker]
        self.seen(self.table.gone(worker))
        for known in (self.local, self.slots, self.granted, self.at):
            known.pop(worker, None)

    def seen(self, effects):
        for effect in effects:
            match effect:
                case Whole(name):
                    assert name in self.table.whole() or name.key < self.table.whole()[-1].key
                case Write(name, final):
                    assert self.writing is None
                    assert name not in self.spoiled
                    self.writing = name
                    if not final:
                        self.asked.add(name)
                case LostSave(name) | Superseded(name):
                    assert name != self.writing
                    self.settled.add(name)
                case Drop(slot):
                    del self.memory[slot]
                    assert slot not in {s for own in self.slots.values() for s in own[:0]}
                case Forget(name):
                    assert name != self.writing
                    assert all(name != read for _, read in self.read)

    # Invariants.

    @invariant()
    def what_is_whole_is_in_its_slots(self):
        used = [*self.table.whole(), *(name for _, name in self.read)]
        used += [self.writing] if self.writing else []
        for name in used:
            for local, slot in self.table.slots_of(name).items():
                assert self.memory[slot] == (name, local)

    @invariant()
    def the_newest_stays_until_there_is_a_newer_one(self):
        newest = next(iter(self.table.whole()), None)
        if self.newest is not None:
            assert newest is not None
            assert newest >= self.newest
        self.newest = newest

    @invariant()
    def no_more_is_held_than_is_needed(self):
        extra = {name for _, name in self.read} | {self.table.writing, self.table.waiting}
        assert len([n for n in self.table.whole() if n not in extra]) <= WHOLE_MAX
        assert not self.spoiled & {*self.table.whole()}

    @invariant()
    def one_is_written_at_a_time(self):
        assert self.table.writing == self.writing
        assert self.table.is_idle or self.table.writing is not None

    def teardown(self):
        """Check that without readers and writers only the next snapshot of a worker is left."""
        while self.writing:
            self.a_writing_ends(durable=False)
        for worker in [*self.local]:
            self.end(worker)
        while self.writing:
            self.a_writing_ends(durable=False)
        assert self.asked <= self.settled
        self.table.joined(worker := self.numbered + 1)
        self.local, self.at, self.locals = {worker: 0}, {worker: 0}, 1
        self.round += 1
        for number in range(WHOLE_MAX + 1):
            size = 9
            mine, effects = self.table.own(worker, size)
            self.seen(effects)
            if not mine:
                slots = [10**6, 10**6 + 1, 10**6 + 2]
                self.memory |= dict.fromkeys(slots)
                self.table.add(worker, size, slots)
            slot, effects = self.table.grant(worker)
            self.seen(effects)
            name = Name(Key(0, self.round, 0, number), "z")
            self.memory[slot] = (name, 0)
            self.seen(self.table.keep(worker, slot, SnapshotPiece(name, 0, 1, persist=False)))
            while self.writing:  # A final flush, after which no worker starts.
                self.a_writing_ends(durable=False)
        assert {*self.memory} == {10**6, 10**6 + 1, 10**6 + 2}, "pieces of other snapshots are left"


BooksTest = Books.TestCase
BooksTest.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.soak
class TestBooksAtLength(Books.TestCase):
    settings = settings(max_examples=5000, stateful_step_count=100, deadline=None)
