"""ElasticLoaders over a stream lose workers between any two collectives: no sample is wrong."""

from collections import Counter

import pytest
import torch
from stream_losses import Crowd
from torch.optim.swa_utils import AveragedModel

from elastane.data.stream_position import StreamPosition
from elastane.errors import ConfigurationError
from elastane.worker import elastic_loader
from elastane.worker.elastic_loader import ElasticLoader


@pytest.fixture(autouse=True)
def kept_class(monkeypatch):
    """Each loop puts its own method into this class, and threads take theirs out in any order."""
    monkeypatch.setattr(AveragedModel, "update_parameters", AveragedModel.update_parameters)


def wrong(crowd):
    """How many samples of a played job are missing and doubled, over all epochs."""
    missing = doubled = 0
    for epoch in range(crowd.epochs):
        counts = Counter(x for e, _, samples in crowd.committed if e == epoch for x in samples)
        missing += crowd.n - len(counts)
        doubled += counts.total() - len(counts)
    return missing, doubled


def play(seeds, monkeypatch):
    events = Counter()
    for seed in seeds:
        crowd = Crowd(seed)
        crowd.play(monkeypatch)
        assert wrong(crowd) == (0, 0), f"Crowd({seed}): missing, doubled"
        most = crowd.batch + -(-crowd.batch // 4)
        assert all(len(samples) <= most for _, _, samples in crowd.committed)
        steps = [step for _, step, _ in crowd.committed]
        per_epoch = -(-crowd.n // crowd.batch)
        assert {*steps} == {*range(crowd.epochs * per_epoch)}, "losses change no count of steps"
        events.update(crowd.events)
    return events


def test_each_sample_is_in_one_committed_step_wherever_workers_are_lost(monkeypatch):
    events = play(range(40), monkeypatch)
    assert min(events.values()) > 5, events


@pytest.mark.soak
def test_a_thousand_jobs_lose_and_double_nothing(monkeypatch):
    play(range(40, 1_040), monkeypatch)


def seen(monkeypatch, seeds=range(12)):
    """How many jobs end with wrong samples, or with the error of shards that do not fit."""
    count = 0
    for seed in seeds:
        crowd = Crowd(seed)
        try:
            crowd.play(monkeypatch)
            count += wrong(crowd) != (0, 0)
        except ConfigurationError:
            count += 1
    return count


def test_a_sum_that_lacks_a_lost_workers_part_and_is_used_all_the_same_is_seen(monkeypatch):
    def without_a_look(_loader, numbers):
        total = torch.tensor(numbers)
        elastic_loader.dist.all_reduce(total)
        return total.tolist()

    monkeypatch.setattr(ElasticLoader, "_add_up", without_a_look)
    assert seen(monkeypatch) > 3


def test_samples_of_lost_workers_that_are_not_owed_are_seen(monkeypatch):
    commit = StreamPosition.commit_without_ranks
    monkeypatch.setattr(StreamPosition, "commit_without_ranks", lambda self, _: commit(self, ()))
    assert seen(monkeypatch) > 3
