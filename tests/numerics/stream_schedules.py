"""A job over a stream under faults, played without processes: each rank holds a feed of its own.

A schedule is drawn from a seed: shards of unknown lengths (empty ones among them), ranks that are
killed in the middle of reading a step, before or while they commit it, that leave, that arrive, and
whole jobs that go back to a checkpoint.
"""

import contextlib
import random

from elastane.data.shard_reading import ShardSource
from elastane.data.stream import ElasticStream, StreamFeed

WORLD_MAX = 6


def shard_lengths(rng, n):
    """Cut n samples into shards: one, or many of equal or wildly different lengths."""
    count = rng.choice((1, 2, 3, 7, 16, 40, 150, 600))
    weights = [rng.choice((0, 1, 1, 3, 50)) * rng.random() for _ in range(count)]
    lengths = [int(n * weight / max(sum(weights), 1e-9)) for weight in weights]
    lengths[rng.randrange(count)] += n - sum(lengths)
    return lengths


class StreamSchedule:
    """One job of some epochs; `committed` has the samples of each committed step, by rank."""

    def __init__(self, seed, n=10_007, epochs=2, size=None, feed=StreamFeed):
        self.rng = random.Random(seed)
        self.feed = feed
        self.n, self.epochs = n, epochs
        self.size = size or round(30 * (3_000 / 30) ** self.rng.random())
        self.lanes = self.rng.choice((1, 3, 8, 16))
        self.shuffle = self.rng.random() < 0.7
        self.micro_batches = self.rng.choice((1, 1, 1, 2, 3))
        lengths = shard_lengths(self.rng, n)
        firsts = [sum(lengths[:k]) for k in range(len(lengths))]
        self.source = ShardSource([*zip(firsts, lengths, strict=True)], self.opened)
        self.ranks = [self.new() for _ in range(self.rng.randint(1, WORLD_MAX))]
        self.committed = []
        self.checkpoint = (self.ranks[0].cursor.state_dict(), 0)
        self.events = dict.fromkeys(
            ("in reading", "in body", "in commit", "left", "arrived", "rolled", "rounds"), 0
        )

    @staticmethod
    def opened(shard, start, _epoch):
        first, length = shard
        return iter(range(first + start, first + length))

    def new(self):
        stream = ElasticStream(
            self.source,
            self.size,
            seed=7,
            shuffle=self.shuffle,
            lanes=self.lanes,
            collate_fn=lambda samples: samples,
        )
        stream.position.accumulate(self.micro_batches)
        return self.feed(stream, None)

    def play(self):
        self.bind()
        while self.ranks[0].cursor.epoch < self.epochs:
            self.change_at_boundary()
            dealt = self.read()
            if dealt is not None and not self.fault(dealt):
                self.commit(dealt, self.ranks)
        return self.committed

    def bind(self):
        for rank, feed in enumerate(self.ranks):
            feed.rewind(rank, len(self.ranks))

    def read(self):
        """What each rank has of the next step, in rounds of all ranks; None if one was killed."""
        steps = [feed.read_step() for feed in self.ranks]
        sums = None
        while True:
            reports, dealt = [], []
            for step in steps:
                try:
                    reports.append(step.send(sums))
                except StopIteration as read:
                    dealt.append(read.value)
            if dealt:
                assert not reports, "all ranks know where the step ends"
                return dealt
            self.events["rounds"] += 1
            if len(self.ranks) > 1 and self.rng.random() < 0.05:
                # Some members have the sums already, and continue.
                sums = [sum(numbers) for numbers in zip(*reports, strict=True)]
                for step in steps[: self.rng.randrange(len(steps))]:
                    next_report(step, sums)
                self.lose("in reading")
                return None
            sums = [sum(numbers) for numbers in zip(*reports, strict=True)]

    def commit(self, dealt, ranks):
        step = dealt[0][0].step
        for feed in ranks:
            feed.commit(step)
        if len({feed.cursor.next_step for feed in self.ranks}) > 1:
            newest = max(self.ranks, key=lambda feed: feed.cursor.next_step)
            for feed in self.ranks:
                if feed.cursor.next_step < newest.cursor.next_step:
                    feed.cursor.load_state_dict(newest.cursor.state_dict())
        self.committed.append(
            [(p.share, p.batch) for portions in dealt for p in portions if p.samples]
        )

    def lose(self, where):
        gone = self.rng.sample(range(len(self.ranks)), self.rng.randint(1, len(self.ranks) - 1))
        self.ranks = [feed for rank, feed in enumerate(self.ranks) if rank not in gone]
        self.events[where] += 1
        self.bind()

    def change_at_boundary(self):
        draw = self.rng.random()
        if draw < 0.1 and len(self.ranks) < WORLD_MAX:
            newcomer = self.new()
            newcomer.cursor.load_state_dict(self.ranks[0].cursor.state_dict())
            self.ranks.insert(self.rng.randint(0, len(self.ranks)), newcomer)
            self.events["arrived"] += 1
        elif draw < 0.18 and len(self.ranks) > 1:
            self.ranks.pop(self.rng.randrange(len(self.ranks)))
            self.events["left"] += 1
        elif draw < 0.24:
            self.checkpoint = (self.ranks[0].cursor.state_dict(), len(self.committed))
        elif draw < 0.26:
            state, steps = self.checkpoint
            self.ranks = [self.new() for _ in range(self.rng.randint(1, WORLD_MAX))]
            for feed in self.ranks:
                feed.cursor.load_state_dict(state)
            del self.committed[steps:]
            self.events["rolled"] += 1
        else:
            return
        self.bind()

    def fault(self, dealt):
        """Perhaps lose ranks in the body or in the commit; return whether that happened."""
        if len(self.ranks) == 1 or self.rng.random() > 0.2:
            return False
        if self.rng.random() < 0.5:
            self.lose("in body")
            return True
        through = [feed for feed in self.ranks if self.rng.random() < 0.5]
        for feed in through:
            feed.commit(dealt[0][0].step)
        self.lose("in commit")
        if any(feed in through for feed in self.ranks):
            self.commit(dealt, ())
        return True


def next_report(step, sums):
    with contextlib.suppress(StopIteration):
        step.send(sums)
