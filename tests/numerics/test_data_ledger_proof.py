"""Every sample is in exactly one committed step of each epoch, whatever happened to the ranks."""

import numpy as np
import pytest
from ledger_schedules import Schedule

from elastane.data.sampler import ElasticBatchSampler

N = 10_007


def _faults(committed, epochs, n=N):
    """How many positions are missing, and how many too many, over all epochs."""
    spans = np.array([(s.epoch, s.start, s.stop) for step in committed for s in step])
    missing = doubled = 0
    for epoch in range(epochs):
        mine = spans[spans[:, 0] == epoch]
        counts = np.zeros(n + 1, dtype=np.int64)
        np.add.at(counts, mine[:, 1], 1)
        np.subtract.at(counts, mine[:, 2], 1)
        times = counts.cumsum()[:n]
        missing += int((times == 0).sum())
        doubled += int((times - 1).clip(0).sum())
    assert (spans[:, 0] < epochs).all()
    return missing, doubled


@pytest.mark.parametrize("schedules", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_thousands_of_schedules_lose_and_double_nothing(schedules):
    events = dict.fromkeys(Schedule(0).events, 0)
    for seed in range(schedules):
        schedule = Schedule(seed)
        faults = _faults(schedule.play(), schedule.epochs)
        assert faults == (0, 0), f"Schedule({seed}): {faults} missing and doubled"
        for name, times in schedule.events.items():
            events[name] += times
    # The schedules are what they are said to be.
    assert min(events.values()) > schedules // 10, events


@pytest.mark.parametrize("size", [1, 3, 4])
def test_steps_of_fewer_samples_than_ranks_lose_and_double_nothing(size):
    schedule = Schedule(size, batch_sizes=(size, size), epochs=1)
    assert _faults(schedule.play(), 1) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_samples_themselves_come_once(seed):
    """Not positions: the indices that the samplers of those ranks gave out."""
    schedule = Schedule(seed)
    counts = np.zeros((schedule.epochs, N), dtype=np.int64)
    sampler: ElasticBatchSampler = schedule.new()
    for step in schedule.play():
        for share, indices in zip(step, sampler.lists(iter(step), step[0].epoch), strict=True):
            assert len(indices) == share.samples
            np.add.at(counts[share.epoch], indices, 1)
    assert (counts == 1).all()


def test_a_job_that_forgets_to_deal_again_is_seen():
    """The proof would notice: one step that is counted and was not computed, or computed twice."""
    schedule = Schedule(1)
    committed = schedule.play()
    del committed[1]
    missing, _ = _faults(committed, schedule.epochs)
    assert missing
    committed.append(committed[0])
    assert _faults(committed, schedule.epochs)[1]
