"""A job's data under faults, played without processes: each rank holds a cursor of its own.

A schedule is drawn from a seed: ranks are killed before or while they commit, hang and come back
with what they had, leave, arrive, and whole jobs go back to a checkpoint. `play` returns what was
committed, as positions, by epoch.
"""

import random

from elastane.data.position import DataPosition
from elastane.data.sampler import ElasticBatchSampler

WORLD_MAX = 5


class Schedule:
    """One job of some epochs; `committed` is a list of (epoch, start, stop), empty shares apart."""

    def __init__(self, seed, n=10_007, batch_sizes=(300, 5_000), epochs=2, make=None):
        self.rng = random.Random(seed)
        self.epochs = epochs
        size = round(batch_sizes[0] * (batch_sizes[1] / batch_sizes[0]) ** self.rng.random())
        self.make = make or (lambda: ElasticBatchSampler(n, size, seed=seed % 8))
        self.micro_batches = self.rng.choice((1, 1, 1, 2, 3))
        self.ranks: list[DataPosition] = [self.new() for _ in range(self.rng.randint(1, WORLD_MAX))]
        self.committed = []
        self.checkpoint = (self.ranks[0].state_dict(), 0)
        self.events = dict.fromkeys(("redealt", "killed", "hung", "left", "arrived", "rolled"), 0)

    def new(self):
        return self.make().accumulate(self.micro_batches)

    def play(self):
        while self.ranks[0].epoch < self.epochs:
            self.change_at_boundary()
            shares = self.deal()
            if not self.fault(shares):
                self.commit(shares, range(len(self.ranks)))
        return self.committed

    def deal(self):
        """What each rank of the present world is given of the step that is next on all of them."""
        world = len(self.ranks)
        assert len({cursor.next_step for cursor in self.ranks}) == 1
        dealt = []
        for rank, cursor in enumerate(self.ranks):
            shares = cursor.bind(rank, world).shares()
            dealt.append([next(shares) for _ in range(self.micro_batches)])
        return dealt

    def commit(self, dealt, ranks):
        """The step is done: `ranks` say so by themselves, the others hear it from them."""
        step = dealt[0][0].step
        for rank in ranks:
            self.ranks[rank].commit(step)
        for cursor in self.ranks:
            cursor.commit(step)
        self.committed.append([s for shares in dealt for s in shares if s.samples])

    def change_at_boundary(self):
        draw = self.rng.random()
        if draw < 0.08 and len(self.ranks) < WORLD_MAX:
            newcomer = self.new()
            newcomer.load_state_dict(self.rng.choice(self.ranks).state_dict())
            self.ranks.insert(self.rng.randint(0, len(self.ranks)), newcomer)
            self.events["arrived"] += 1
        elif draw < 0.16 and len(self.ranks) > 1:
            self.ranks.pop(self.rng.randrange(len(self.ranks)))
            self.events["left"] += 1
        elif draw < 0.22:
            self.checkpoint = (self.ranks[0].state_dict(), len(self.committed))
        elif draw < 0.24:
            # Everybody died: other processes, perhaps more or fewer, from the checkpoint.
            state, steps = self.checkpoint
            self.ranks = [self.new() for _ in range(self.rng.randint(1, WORLD_MAX))]
            for cursor in self.ranks:
                cursor.load_state_dict(state)
            del self.committed[steps:]
            self.events["rolled"] += 1

    def fault(self, dealt):
        """Perhaps end the step otherwise than well; return whether it did."""
        draw, world = self.rng.random(), len(self.ranks)
        if draw > 0.3 or world == 1:
            return False
        victims = set(self.rng.sample(range(world), self.rng.randint(1, world - 1)))
        done = set()
        if draw < 0.15:  # some were through already
            done = {rank for rank in range(world) if self.rng.random() < 0.5}
            for rank in done:
                self.ranks[rank].commit(dealt[0][0].step)
        alive = [cursor for rank, cursor in enumerate(self.ranks) if rank not in victims]
        lost = [self.ranks[rank] for rank in victims]
        self.ranks = alive
        if done - victims:
            # The furthest survivor is right; state that only lost members had is gone.
            self.commit(dealt, ())
        else:
            self.events["redealt"] += 1
        if self.rng.random() < 0.3:
            # It hung, and wakes up with a place of its own, behind or ahead of the job's.
            late = self.rng.choice(lost)
            late.load_state_dict(alive[0].state_dict())
            alive.append(late)
            self.events["hung"] += 1
        self.events["killed"] += len(victims)
        return True
