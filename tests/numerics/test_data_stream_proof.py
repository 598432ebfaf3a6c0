"""Each sample of a stream of unknown length is in exactly one committed step of each epoch."""

from collections import Counter

import pytest
from stream_schedules import StreamSchedule

from elastane.data.stream import StreamFeed
from elastane.errors import ConfigurationError

N = 10_007
SCHEDULES = 100
SEEDS = range(SCHEDULES)


def faults(schedule):
    """How many samples are missing, doubled and padded, over all epochs of a played schedule."""
    missing = doubled = padded = 0
    for epoch in range(schedule.epochs):
        steps = [step for step in schedule.committed if step[0][0].epoch == epoch]
        counts = Counter(x for step in steps for share, batch in step for x in batch)
        missing += schedule.n - len(counts)
        doubled += counts.total() - len(counts)
        for step in steps:
            share = step[0][0]
            padded += sum(len(batch) - each.samples for each, batch in step)
            assert sum(len(batch) for _, batch in step) == share.step_samples
            # Only the last step of an epoch is smaller.
            assert share.step_samples == schedule.size or step is steps[-1]
        assert len(steps) == -(-schedule.n // schedule.size)
    return missing, doubled, padded


def play(seeds, **options):
    events = Counter()
    for seed in seeds:
        schedule = StreamSchedule(seed, **options)
        schedule.play()
        assert faults(schedule) == (0, 0, 0), f"StreamSchedule({seed}): missing, doubled, padded"
        events.update(schedule.events)
    return events


def test_histories_of_faults_lose_double_and_pad_nothing():
    events = play(SEEDS)
    assert min(events.values()) > SCHEDULES // 10, events


@pytest.mark.soak
def test_a_thousand_histories_lose_double_and_pad_nothing():
    play(range(SCHEDULES, SCHEDULES + 1_000))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_steps_of_fewer_samples_than_ranks_lose_double_and_pad_nothing(size):
    play(range(20), n=97, size=size)


def test_a_step_has_the_same_samples_in_every_world_and_after_any_fault():
    for seed in range(20):
        steps = []
        for feed_seed in (seed, seed + 1_000):
            schedule = StreamSchedule(seed, n=997, size=50)
            schedule.rng.seed(feed_seed)  # other faults over the same data
            steps.append([sorted(x for _, b in step for x in b) for step in schedule.play()])
        assert steps[0] == steps[1]


def test_a_step_that_is_counted_wrongly_is_seen():
    schedule = StreamSchedule(1)
    schedule.play()
    lost = schedule.committed.pop(1)
    with pytest.raises(AssertionError):
        faults(schedule)
    schedule.committed[1:1] = [lost]
    assert faults(schedule) == (0, 0, 0)
    schedule.committed[2] = lost
    assert faults(schedule)[:2] != (0, 0)


class Hurried(StreamFeed):
    """Keeps what it has read of a step when the world changes, as a loader of its own would."""

    def rewind(self, rank=None, world_size=None):
        super().rewind(rank, world_size)
        for reader in self._readers._open.values():
            reader.start += 1


def test_a_feed_that_does_not_go_back_to_the_committed_position_is_seen():
    seen = 0
    for seed in range(10):
        schedule = StreamSchedule(seed, epochs=1, feed=Hurried)
        try:
            schedule.play()
            seen += faults(schedule) != (0, 0, 0)
        except ConfigurationError:
            seen += 1
    assert seen > 3
