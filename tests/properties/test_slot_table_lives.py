"""Local workers take snapshots without pause, die one after the other and are replaced.

A snapshot that several workers kept is complete in any order of their deaths. No worker waits for
ever for the piece of a dead one. Each history follows from its seed.
"""

from __future__ import annotations

import random

import pytest

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.slot_table import Name, SlotTable, SnapshotPiece

SLOTS = 3
# Requests in a row of all workers without a grant, after which the test sees a deadlock.
PATIENCE = 300


class Worker:
    def __init__(self, number, local, step):
        self.number, self.local, self.step = number, local, step
        self.slot, self.has_slots, self.waited = None, False, 0


class History:
    def __init__(self, seed, locals_):
        self.chance = random.Random(seed)
        self.table = SlotTable()
        self.locals = locals_
        self.life = self.workers = self.slots = 0
        self.unseen = []  # dead workers that the slot table counts as alive

    def live(self, start):
        """Run one set of workers until all are dead; return the last snapshot that all kept."""
        self.life += 1
        crew = [self.worker(local, start) for local in range(self.locals)]
        enough = start + self.chance.randint(2, 6)
        while min(worker.step for worker in crew) < enough:
            self.happen(crew)
            assert self.unseen or min(worker.waited for worker in crew) < PATIENCE, (
                "all workers wait"
            )
        left = [*crew]
        while left:
            self.chance.shuffle(left)
            self.unseen.append(left.pop())
            for _ in range(self.chance.randint(0, 12) if left else 0):
                self.happen(left)
        return min(worker.step for worker in crew)

    def worker(self, local, start):
        self.workers += 1
        return Worker(self.workers, local, start)

    def happen(self, crew):
        """Process one event: a death is noticed, or a worker takes its next step."""
        if self.unseen and self.chance.random() < 0.3:
            self.table.gone(self.unseen.pop(self.chance.randrange(len(self.unseen))).number)
            return
        worker = self.chance.choice(crew)
        if not worker.has_slots:
            self.table.joined(worker.number)
            mine, _ = self.table.own(worker.number, 1)
            new = range(self.slots, self.slots + max(0, SLOTS - len(mine)))
            self.slots = new.stop
            self.table.add(worker.number, 1, new)
            worker.has_slots = True
        elif worker.slot is None:
            worker.slot, _ = self.table.grant(worker.number)
            worker.waited = worker.waited + 1 if worker.slot is None else 0
        else:
            worker.step += 1
            name = Name(Key(0, self.life, 0, worker.step), "n")
            piece = SnapshotPiece(name, worker.local, self.locals, persist=False)
            self.table.keep(worker.number, worker.slot, piece)
            worker.slot = None


def check(seed, locals_):
    history, start = History(seed, locals_), 0
    for _ in range(6):
        kept = history.live(start)
        newest = history.table.whole()[0].key.step
        assert newest >= kept, (
            f"seed {seed}, {locals_} workers: newest is {newest}, kept was {kept}"
        )
        start = newest


@pytest.mark.parametrize("locals_", [1, 2, 3])
def test_whole_snapshots_survive_their_workers_and_no_grant_waits_for_a_dead_worker(locals_):
    for seed in range(150):
        check(seed, locals_)


@pytest.mark.soak
def test_no_grant_waits_for_a_dead_worker_in_many_histories():
    for seed in range(30_000):
        check(seed, 1 + seed % 4)
