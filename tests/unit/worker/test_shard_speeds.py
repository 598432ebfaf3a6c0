"""Virtual shards are dealt by speed: as fast as can be, and not for noise."""

import itertools
import random

import pytest

from elastane.worker import shard_speeds
from elastane.worker.shard_speeds import ShardSpeeds, fastest_deal, lasts_s


def every_deal(ranks, shards):
    """All ways to deal the shards with at least one for each rank."""
    for cuts in itertools.combinations(range(1, shards), ranks - 1):
        ends = [0, *cuts, shards]
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seed", range(40))
def test_no_deal_is_done_earlier(seed):
    drawn = random.Random(seed)
    ranks = drawn.randrange(1, 6)
    shards = drawn.randrange(ranks, 13)
    times_s = [drawn.choice([0.01, 0.02, drawn.random() + 1e-6]) for _ in range(ranks)]
    found = fastest_deal(times_s, shards)
    assert sum(found) == shards and len(found) == ranks and min(found) >= 1
    best_s = min(lasts_s(each, times_s) for each in every_deal(ranks, shards))
    assert lasts_s(found, times_s) == pytest.approx(best_s)


class World:
    """The ranks of a world, each with its own measurements; a step costs no time."""

    def __init__(self, counts):
        self.counts = tuple(counts)
        self.speeds = [ShardSpeeds() for _ in counts]
        self.changes = []

    def steps(self, count, time_s):
        """Make steps in which a shard takes `time_s(rank)` seconds."""
        for step in range(count):
            over = [
                each.measure(shards * time_s(rank), shards)
                for rank, (each, shards) in enumerate(zip(self.speeds, self.counts, strict=True))
            ]
            assert len({*over}) == 1, "ranks end their windows at different steps"
            if not over[0]:
                continue
            medians_us = [each.pop_median_us() for each in self.speeds]
            found = {each.decide(self.counts, medians_us) for each in self.speeds}
            assert len(found) == 1, "ranks decide differently"
            (after,) = found
            if after != self.counts:
                self.changes.append((step, after))
            self.counts = after


def test_a_slow_rank_has_fewer_shards_after_two_windows_and_gets_them_back():
    world = World([4, 4, 4, 4])
    world.steps(31, lambda rank: 0.02 if rank == 2 else 0.01)
    assert world.changes == []
    world.steps(1, lambda rank: 0.02 if rank == 2 else 0.01)
    assert world.counts == (5, 5, 2, 4)
    world.steps(64, lambda rank: 0.02 if rank == 2 else 0.01)
    assert len(world.changes) == 1
    world.steps(64, lambda rank: 0.01)
    assert world.counts == (4, 4, 4, 4)


def test_at_least_80_percent_of_the_best_throughput_are_regained():
    """With enough shards; the best one deals parts of shards, too."""
    for slower, shards in itertools.product((1.3, 1.5, 2.0, 3.0, 5.0), (16, 32)):
        times_s = [0.01, 0.01, 0.01, 0.01 * slower]
        even_s = lasts_s([shards // 4] * 4, times_s)
        best_s = shards / sum(1 / each for each in times_s)
        found_s = lasts_s(fastest_deal(times_s, shards), times_s)
        assert best_s / found_s >= 0.8
        assert found_s <= even_s


@pytest.mark.parametrize(("shards", "of_best"), [(16, 0.90), (8, 0.75)])
def test_more_shards_level_finer(shards, of_best):
    """docs/deterministic.md has these bounds for one worker of four that takes twice as long."""
    times_s = [0.01, 0.01, 0.01, 0.02]
    best_s = shards / sum(1 / each for each in times_s)
    assert best_s / lasts_s(fastest_deal(times_s, shards), times_s) >= of_best


@pytest.mark.parametrize("seed", range(10))
def test_noise_changes_nothing_in_10_000_steps(seed):
    """One step in ten of any rank takes three times as long, and all vary by a tenth."""
    drawn = random.Random(seed)

    def time_s(rank):
        return drawn.uniform(0.009, 0.011) * (3.0 if drawn.random() < 0.1 else 1.0)

    world = World([4, 4, 4, 4])
    world.steps(10_000, time_s)
    assert world.changes == []


def test_one_slow_window_changes_nothing():
    world = World([4, 4])
    for _ in range(20):
        world.steps(16, lambda rank: 0.05 if rank else 0.01)
        world.steps(16, lambda rank: 0.01)
    assert world.changes == []


def test_windows_of_fast_steps_are_longer():
    world = World([2, 2])
    world.steps(16 + 32 + 64 + 128 + 256 + 512 + 1023, lambda rank: 0.0002 if rank else 0.0001)
    assert world.changes == [], "no window but the last one may decide, and two have to"
    world.steps(2 * shard_speeds.WINDOW_MAX, lambda rank: 0.0002 if rank else 0.0001)
    assert world.counts == (3, 1)


def test_as_many_ranks_as_shards_leave_nothing_to_deal():
    world = World([1, 1, 1])
    world.steps(100, lambda rank: 1.0 + rank)
    assert world.counts == (1, 1, 1)


def test_a_shard_that_takes_no_time_is_counted_as_one_microsecond():
    speeds = ShardSpeeds()
    while not speeds.measure(0.0, 3):
        pass
    assert speeds.pop_median_us() == 1
