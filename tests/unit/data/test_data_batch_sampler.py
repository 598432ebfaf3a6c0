"""ElasticBatchSampler: positions, worlds, commits, states, and refused arguments."""

import copy
import json
import pickle
import sys
import tracemalloc
import types
from itertools import chain

import numpy as np
import pytest
from torch.utils.data import DataLoader

import elastane
from elastane.data.feed import Feed
from elastane.data.permutation import Permutation
from elastane.data.sampler import ElasticBatchSampler
from elastane.errors import ConfigurationError


def flat(lists):
    return list(chain.from_iterable(lists))


def epoch_of(sampler, world=1):
    """Return all indices of the rest of the epoch, step by step, over all ranks of a world."""
    ranks = [list(sampler.bind(rank, world)) for rank in range(world)]
    return [flat(lists) for lists in zip(*ranks, strict=True)]


def refused(slug):
    return pytest.raises(ConfigurationError, match=rf"\[{slug}\]")


def test_the_package_exports_the_sampler():
    assert elastane.ElasticBatchSampler is ElasticBatchSampler


def test_an_epoch_is_the_permutation_in_batches():
    sampler = ElasticBatchSampler(23, 10, seed=4)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [10, 10, 3]
    assert flat(batches) == Permutation(23, 4, 0).block(0, 23).tolist()
    assert all(type(index) is int for index in batches[0])


def test_without_shuffle_the_order_is_that_of_the_dataset():
    assert epoch_of(ElasticBatchSampler(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_drop_last_leaves_the_partial_step_out():
    sampler = ElasticBatchSampler(7, 3, shuffle=False, drop_last=True)
    assert epoch_of(sampler) == [[0, 1, 2], [3, 4, 5]]
    sampler.commit()
    sampler.commit()
    assert sampler.place == (1, 0)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_step_holds_the_same_samples_in_every_world(world):
    """The last step of 23 samples by 10 has 3: in a world of 5, two ranks get a stand-in."""
    alone = epoch_of(ElasticBatchSampler(23, 10, seed=4))
    sampler = ElasticBatchSampler(23, 10, seed=4)
    for number, step in enumerate(alone):
        shares = [sampler.bind(rank, world).share(number) for rank in range(world)]
        lists = [next(sampler.lists(iter([share]), 0)) for share in shares]
        assert flat(one for s, one in zip(shares, lists, strict=True) if s.samples) == step
        for share, one in zip(shares, lists, strict=True):
            assert share.samples or (one == step[:1] and share.weight == 0.0)


def test_micro_batches_divide_the_share_of_a_step():
    whole = list(ElasticBatchSampler(20, 10, seed=1).bind(1, 2))
    sampler = ElasticBatchSampler(20, 10, seed=1, micro_batches=3).bind(1, 2)
    parts = list(sampler)
    assert len(sampler) == len(parts) == 6
    assert [parts[0] + parts[1] + parts[2], parts[3] + parts[4] + parts[5]] == whole
    shares = list(sampler.shares())
    assert [share.is_last for share in shares] == [False, False, True] * 2
    assert [share.micro for share in shares] == [0, 1, 2] * 2
    assert sum(share.weight for share in shares[:3]) == pytest.approx(1.0)


def test_only_committed_steps_count():
    sampler = ElasticBatchSampler(30, 10, shuffle=False)
    assert len(list(sampler)) == 3
    assert sampler.place == (0, 0)
    sampler.commit(0)
    assert sampler.place == (0, 10)
    assert len(sampler) == 2
    assert next(iter(sampler))[0] == 10


def test_an_iterator_keeps_the_place_and_the_world_it_began_with():
    sampler = ElasticBatchSampler(30, 10, shuffle=False).bind(0, 2)
    batches = iter(sampler)
    sampler.commit()
    sampler.bind(0, 1)
    assert next(batches) == [0, 1, 2, 3, 4]
    assert next(iter(sampler)) == list(range(10, 20))


def test_the_last_commit_of_an_epoch_begins_the_next_with_another_order():
    sampler = ElasticBatchSampler(30, 10)
    first = list(sampler)
    for step in range(3):
        sampler.commit(step)
    assert (sampler.place, sampler.epoch, sampler.next_step) == ((1, 0), 1, 3)
    second = list(sampler)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(30))
    assert first != second


def test_a_commit_that_comes_twice_counts_once():
    sampler = ElasticBatchSampler(30, 10)
    for step in (0, 0, 1, 0, 1):
        sampler.commit(step)
    assert sampler.next_step == 2


def test_a_commit_beyond_the_next_step_is_refused():
    sampler = ElasticBatchSampler(30, 10)
    with refused("data-step") as raised:
        sampler.commit(1)
    assert "step is 1" in str(raised.value)
    assert sampler.next_step == 0


def test_set_epoch_stays_within_its_own_epoch_and_goes_to_any_other():
    sampler = ElasticBatchSampler(30, 10)
    sampler.set_epoch(4)
    sampler.commit()
    sampler.set_epoch(4)
    assert sampler.place == (4, 10)
    sampler.set_epoch(5)
    assert sampler.place == (5, 0)
    with refused("data-size"):
        sampler.set_epoch(-1)


def test_a_state_continues_in_another_world_with_other_micro_batches():
    sampler = ElasticBatchSampler(30, 10, seed=9)
    sampler.set_epoch(2)
    rest = epoch_of(sampler)[1:]
    sampler.commit()
    state = json.loads(json.dumps(sampler.state_dict()))
    assert (state["epoch"], state["samples"]) == (2, 10)
    other = ElasticBatchSampler(30, 10, seed=9)
    other.load_state_dict(state)
    assert epoch_of(other, world=3) == rest
    assert other.state_dict() == state


def test_numbers_of_numpy_make_a_state_of_plain_ones():
    four = np.int64(4)
    sampler = ElasticBatchSampler(four * 5, four, seed=four).bind(four - 4, four)
    sampler.set_epoch(four)
    sampler.commit(four * 5)
    plain = json.loads(json.dumps(sampler.state_dict()))
    assert (plain["n"], plain["global_batch_size"], plain["seed"]) == (20, 4, 4)
    assert (plain["epoch"], plain["samples"]) == (4, 4)


def test_a_copy_of_a_sampler_is_one_of_its_own():
    sampler = ElasticBatchSampler(30, 10)
    Feed(DataLoader(range(30), batch_sampler=sampler))
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert list(other) == list(sampler)
        other.commit()
        assert sampler.next_step == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("n", 31), ("global_batch_size", 5), ("seed", 1), ("shuffle", False), ("drop_last", True)],
)
def test_a_state_of_other_data_is_refused_by_name(key, value):
    sampler = ElasticBatchSampler(30, 10)
    sampler.commit()
    arguments = {"n": 30, "global_batch_size": 10, key: value}
    other = ElasticBatchSampler(**arguments)
    with refused("data-state") as raised:
        other.load_state_dict(sampler.state_dict())
    assert raised.value.what.startswith(f"{key} is ")
    assert repr(value) in raised.value.expected
    assert raised.value.next_step
    assert other.next_step == 0


@pytest.mark.parametrize(
    "spoilt",
    [{"samples": 11}, {"samples": 30}, {"samples": -10}, {"epoch": None}, {"samples": 10.0}],
    ids=str,
)
def test_a_state_with_an_impossible_position_is_refused(spoilt):
    sampler = ElasticBatchSampler(30, 10)
    with pytest.raises(ConfigurationError, match=r"\[data-(state|size)\]"):
        sampler.load_state_dict({**sampler.state_dict(), **spoilt})


@pytest.mark.parametrize("state", [None, [], {}, {"format": 2}, "x"], ids=str)
def test_an_invalid_state_is_refused(state):
    with refused("data-state"):
        ElasticBatchSampler(30, 10).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("n", {"n": -1}),
        ("n", {"n": 3.0}),
        ("n", {"n": None}),
        ("global_batch_size", {"global_batch_size": 0}),
        ("global_batch_size", {"global_batch_size": -4}),
        ("global_batch_size", {"global_batch_size": 2.5}),
        ("global_batch_size", {"global_batch_size": True}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": "0"}),
        ("micro_batches", {"micro_batches": 0}),
    ],
    ids=str,
)
def test_an_invalid_size_is_refused_by_name(name, arguments):
    with refused("data-size") as raised:
        ElasticBatchSampler(**{"n": 30, "global_batch_size": 10, **arguments})
    assert raised.value.what.startswith(f"{name} is ")


@pytest.mark.parametrize(("n", "drop_last"), [(0, False), (0, True), (9, True)])
def test_an_epoch_without_a_step_is_refused(n, drop_last):
    with refused("data-no-step"):
        ElasticBatchSampler(n, 10, drop_last=drop_last)


@pytest.mark.parametrize("world", [(0, 0), (1, 1), (-1, 2), (0, 1.5), ("0", 1)], ids=str)
def test_an_impossible_world_is_refused(world):
    with refused("data-size"):
        ElasticBatchSampler(30, 10).bind(*world)


def test_the_world_is_that_of_torch_until_one_is_bound(monkeypatch):
    sampler = ElasticBatchSampler(30, 10, shuffle=False)
    assert sampler.world == (0, 1)
    dist = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    assert sampler.world == (1, 2)
    assert next(iter(sampler)) == [5, 6, 7, 8, 9]
    assert sampler.bind(0, 5).world == (0, 5)


@pytest.mark.parametrize("world", [1, 8])
def test_the_middle_of_an_epoch_of_a_billion_takes_no_memory(world):
    """Under a megabyte; how long it takes is measured by bench/permutation.py."""
    sampler = ElasticBatchSampler(10**9, 4_096, seed=1).bind(0, world)
    state = {**sampler.state_dict(), "epoch": 3, "samples": 4_096 * 100_000}
    next(iter(sampler))
    tracemalloc.start()
    other = ElasticBatchSampler(10**9, 4_096, seed=1).bind(0, world)
    other.load_state_dict(state)
    first = next(iter(other))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    place = 4_096 * 100_000
    assert first == Permutation(10**9, 1, 3).block(place, place + 4_096 // world).tolist()
    assert peak < 2**20
