"""A Feed without worker processes: pairs of batch and share, rewinds, weights, refusals."""

import pytest
import torch
from torch.utils.data import DataLoader

from elastane.data.feed import Feed
from elastane.data.sampler import ElasticBatchSampler
from elastane.errors import ConfigurationError


def feed_of(n=23, batch=10, *, data=None, **options):
    sampler = ElasticBatchSampler(n, batch, **{"shuffle": False, **options})
    return Feed(DataLoader(range(n) if data is None else data, batch_sampler=sampler))


def refused(slug):
    return pytest.raises(ConfigurationError, match=rf"\[{slug}\]")


def test_each_portion_says_its_step_its_samples_and_its_weight():
    feed = feed_of()
    feed.rewind(0, 3)
    told = [(p.step, p.batch.tolist(), p.samples, p.weight) for p in feed]
    assert told == [
        (0, [0, 1, 2], 3, 0.9),
        (1, [10, 11, 12], 3, 0.9),
        (2, [20], 1, 1.0),
    ]


def test_a_rank_without_samples_gets_a_stand_in_of_weight_zero():
    feed = feed_of(n=22)
    feed.commit(0)
    feed.commit(1)
    portions = []
    for rank in range(5):
        feed.rewind(rank, 5)
        portions.append(next(feed))
    assert [p.samples for p in portions] == [0, 0, 1, 0, 1]
    assert [p.weight for p in portions] == [0, 0, 2.5, 0, 2.5]
    assert [p.batch.tolist() for p in portions] == [[20], [20], [20], [20], [21]]


def test_a_loop_begins_at_the_committed_place_and_ends_with_the_epoch():
    feed = feed_of()
    first = [p.step for p in feed]
    assert first == [p.step for p in feed] == [0, 1, 2]  # nothing was committed
    for portion in feed:
        feed.commit(portion.step)
    assert [p.step for p in feed] == [3, 4, 5]


def test_a_rewind_without_a_world_keeps_it():
    feed = feed_of()
    feed.rewind(1, 2)
    assert next(feed).batch.tolist() == [5, 6, 7, 8, 9]
    feed.rewind()
    assert next(feed).batch.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("world", [(0, None), (None, 2), (2, 2), (-1, 2)], ids=str)
def test_an_impossible_world_is_refused(world):
    with refused("data-size"):
        feed_of().rewind(*world)


def test_the_exception_of_an_unreadable_sample_is_raised_unchanged():
    class Broken(list):
        def __getitem__(self, index):
            raise KeyError(index)

    feed = feed_of(n=3, data=Broken(range(3)))
    with pytest.raises(KeyError):
        next(feed)


class Cut:
    """A loader that drops or adds a batch."""

    def __init__(self, batches, change):
        self.batch_sampler, self.change = batches, change

    def __iter__(self):
        return iter([*self.batch_sampler][: self.change or None] + [[0]] * (not self.change))


@pytest.mark.parametrize(("change", "word"), [(-1, "fewer"), (0, "more")])
def test_a_loader_with_other_batches_than_its_sampler_is_refused(change, word):
    feed = Feed(Cut(ElasticBatchSampler(23, 10), change))
    with refused("data-loader") as raised:
        list(feed)
    assert f"{word} batches" in raised.value.what


class Kept:
    """A loader with persistent workers, one of which dies while a new iterator starts."""

    def __init__(self, batches):
        self.batch_sampler, self._iterator, self.begun = batches, None, 0

    def __iter__(self):
        self.begun += 1
        if self._iterator is not None:
            raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
        self._iterator = iter([*self.batch_sampler])
        return self._iterator


def test_workers_that_die_while_they_are_begun_again_are_replaced_once():
    loader = Kept(ElasticBatchSampler(23, 10))
    feed = Feed(loader)
    assert next(feed).step == 0
    feed.rewind()
    assert next(feed).step == 0
    assert loader.begun == 3


def test_loaders_whose_batches_cannot_be_identified_are_refused():
    sampler = ElasticBatchSampler(23, 10)
    unordered = DataLoader(range(23), batch_sampler=sampler)
    unordered.in_order = False
    loaders = [
        DataLoader(range(23), batch_size=5),
        DataLoader(range(22), batch_sampler=sampler),
        unordered,
        [1, 2, 3],
    ]
    for loader in loaders:
        with refused("data-loader"):
            Feed(loader)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("batch", [4, 10, 23])
def test_the_mean_of_weighted_gradients_is_that_over_the_global_batch(world, micro_batches, batch):
    """DDP averages each rank's gradients over the ranks."""
    torch.manual_seed(0)
    data = torch.randn(23, 3, dtype=torch.float64)
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def gradient(samples):
        return torch.autograd.grad((samples @ weights).pow(2).mean(), weights)[0]

    feed = feed_of(23, batch, data=data, micro_batches=micro_batches, shuffle=True)
    order = [i for step in ElasticBatchSampler(23, batch) for i in step]
    for step in range(feed.cursor.ledger.steps_per_epoch):
        total = torch.zeros(3, dtype=torch.float64)
        for rank in range(world):
            feed.rewind(rank, world)
            for _ in range(micro_batches):
                portion = next(feed)
                total += gradient(portion.batch) * portion.weight
        whole = gradient(data[order[step * batch : (step + 1) * batch]])
        torch.testing.assert_close(total / world, whole, rtol=1e-12, atol=1e-14)
        feed.commit(step)
