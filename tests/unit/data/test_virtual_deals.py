"""Virtual shards that are dealt unevenly: the same shards, each once, on other ranks."""

import pytest
from torch.utils.data import DataLoader

from elastane.data.feed import Feed
from elastane.data.sampler import ElasticBatchSampler
from elastane.data.shards import ElasticShards
from elastane.errors import ConfigurationError

SHARDS = 8
LENGTHS = {"a": 40, "b": 24}


def sampler_of(rank, size):
    return ElasticBatchSampler(40, 20, seed=1).cut_into(SHARDS, 5).bind(rank, size)


def step_of(cursor):
    """The shards of this rank in the next step, with their samples."""
    lists = iter(cursor)
    return {cursor.share(micro=i).shard: next(lists) for i in range(cursor.portions_per_step)}


def test_any_deal_has_the_same_shards_with_the_same_samples():
    whole = step_of(sampler_of(0, 1))
    assert [*whole] == [*range(SHARDS)]
    for counts in ([4, 4], [1, 7], [3, 1, 4], [1, 1, 5, 1]):
        found = {}
        for rank in range(len(counts)):
            own = step_of(sampler_of(rank, len(counts)).deal_by(counts))
            assert len(own) == counts[rank] and not found.keys() & own.keys()
            found |= own
        assert found == whole


def test_a_deal_ends_with_its_world_and_with_other_shards():
    cursor = sampler_of(1, 2)
    assert cursor.dealt == (range(4), range(4, 8))
    assert cursor.deal_by([2, 6]).dealt == (range(2), range(2, 8))
    assert cursor.bind(1, 2).dealt == (range(4), range(4, 8)), "its members may be others"
    assert cursor.deal_by([2, 6]).cut_into(4).dealt == (range(2), range(2, 4))


@pytest.mark.parametrize("counts", [[8], [4, 3], [0, 8], [3, 3, 2]])
def test_a_deal_of_other_shards_or_ranks_is_refused_and_changes_nothing(counts):
    cursor = sampler_of(0, 2)
    with pytest.raises(ConfigurationError, match=r"for 8 virtual shards.*\[data-step\]"):
        cursor.deal_by(counts)
    assert cursor.portions_per_step == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_of_a_loader_of_shards_follow_a_deal(workers):
    def feed_of(rank, size):
        data = ElasticShards(LENGTHS.items(), _open, 16, lanes=4).cut_into(SHARDS).bind(rank, size)
        more = {"persistent_workers": True} if workers else {}
        return Feed(DataLoader(data, batch_size=None, num_workers=workers, **more))

    def next_step(feed):
        return [next(feed).batch for _ in range(feed.cursor.portions_per_step)]

    with feed_of(0, 1) as alone, feed_of(0, 2) as first, feed_of(1, 2) as second:
        for step, counts in enumerate([[4, 4], [1, 7], [6, 2]]):
            for feed in (first, second):
                feed.cursor.deal_by(counts)
                feed.rewind()
            assert next_step(first) + next_step(second) == next_step(alone)
            for feed in (alone, first, second):
                feed.commit(step)


def _open(shard, start):
    return ((shard, i) for i in range(start, LENGTHS[shard]))
