"""ElasticShards in one process: exactly once, in order within a shard, resumed within it."""

from itertools import chain, product

import pytest

from elastane.data.shards import ElasticShards
from elastane.errors import ConfigurationError

SHARDS = {"a": 11, "b": 0, "c": 23, "d": 5, "e": 40, "f": 1, "g": 17}
EVERY = sorted((name, i) for name, length in SHARDS.items() for i in range(length))


class Opened:
    """Opens shards and records each opening."""

    def __init__(self, lengths=None):
        self.lengths = lengths or SHARDS
        self.log = []

    def __call__(self, shard, start):
        self.log.append((shard, start))
        return ((shard, i) for i in range(start, self.lengths[shard]))


def make(batch=10, opened=None, **options):
    return ElasticShards(SHARDS.items(), opened or Opened(), batch, **{"lanes": 4, **options})


def refused(slug):
    return pytest.raises(ConfigurationError, match=rf"\[{slug}\]")


@pytest.mark.parametrize(
    ("batch", "lanes", "world"), [*product([1, 7, 10, 97, 500], [1, 4, 30], [1, 2, 5])]
)
def test_each_sample_is_in_one_step_whatever_the_world(batch, lanes, world):
    alone = list(make(batch, lanes=lanes))
    data, seen = make(batch, lanes=lanes), []
    for step, whole in enumerate(alone):
        dealt = []
        for rank in range(world):
            share, samples = data.bind(rank, world).share(), next(iter(data))
            dealt += samples if share.samples else []
            assert len(samples) == max(share.samples, 1)
        assert dealt == whole
        seen += dealt
        data.commit(step)
    assert sorted(seen) == EVERY


def test_the_epoch_decides_the_order_of_the_shards():
    data = make()
    first = [s for step in data for s in step]
    data.set_epoch(1)
    second = [s for step in data for s in step]
    assert first != second
    assert sorted(first) == sorted(second) == EVERY
    plain = make(lanes=1, shuffle=False)
    assert [s for step in plain for s in step] == EVERY


def test_shards_resume_within_a_shard_and_earlier_ones_are_not_opened():
    data = make()
    steps = list(data)
    for step in range(4):
        data.commit(step)
    state = data.state_dict()
    opened = Opened()
    other = make(opened=opened)
    other.load_state_dict(state)
    assert list(other) == steps[4:]
    assert len(other) == len(steps) - 4
    assert any(start > 0 for _, start in opened.log)


def test_a_steady_world_opens_each_stretch_once():
    opened = Opened()
    list(make(opened=opened))
    # A shard that a lane ends in is opened once more by the lane that goes on with it.
    assert len(opened.log) == len(set(opened.log)) <= len(SHARDS) + 4


@pytest.mark.parametrize(("length", "word"), [(22, "ended after 22"), (24, "has more")])
def test_a_shard_of_another_length_is_refused_by_name(length, word):
    with refused("data-shard") as raised:
        list(make(opened=Opened({**SHARDS, "c": length})))
    assert raised.value.what == f"shard 'c' {word}"


def test_a_state_of_other_shards_or_lanes_is_refused():
    data = make()
    data.commit()
    state = data.state_dict()
    moved = ElasticShards([*SHARDS.items()][::-1], Opened(), 10, lanes=4)
    for other, key in ((moved, "lengths"), (make(lanes=5), "lanes"), (make(seed=1), "seed")):
        with refused("data-state") as raised:
            other.load_state_dict(state)
        assert raised.value.what.startswith(f"{key} is ")


@pytest.mark.parametrize(
    ("shards", "name"),
    [([("a", -1)], "length of shard 'a'"), ([("a", 5), ("b", 1.5)], "length of shard 'b'")],
    ids=str,
)
def test_an_invalid_length_is_refused_by_name(shards, name):
    with refused("data-size") as raised:
        ElasticShards(shards, Opened(), 10)
    assert raised.value.what.startswith(name)


def test_no_samples_at_all_are_refused():
    with refused("data-no-step"):
        ElasticShards([("b", 0)], Opened(), 10)
    with refused("data-size"):
        make(lanes=0)


def test_micro_batches_divide_the_share_of_a_step():
    whole = list(make())
    parts = list(make().accumulate(3))
    assert len(parts) == 3 * len(whole)
    joined = [[*chain(*parts[i : i + 3])] for i in range(0, len(parts) - 3, 3)]
    assert joined == whole[:-1]
