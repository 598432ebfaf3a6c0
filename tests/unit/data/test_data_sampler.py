"""ElasticSampler: like torch's DistributedSampler, and able to continue from any position."""

import itertools

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import elastane
from elastane.data.permutation import Permutation
from elastane.data.sampler import ElasticSampler
from elastane.errors import ConfigurationError


def refused(slug):
    return pytest.raises(ConfigurationError, match=rf"\[{slug}\]")


def test_the_package_exports_the_sampler():
    assert elastane.ElasticSampler is ElasticSampler


@pytest.mark.parametrize(("n", "world"), [*itertools.product([1, 2, 7, 30, 31], [1, 2, 3, 5, 40])])
def test_without_shuffle_it_deals_as_torch_does(n, world):
    for rank in range(world):
        mine = ElasticSampler(range(n), world, rank, shuffle=False)
        torchs = DistributedSampler(range(n), world, rank, shuffle=False)
        assert list(mine) == list(torchs)
        assert len(mine) == len(torchs)


@pytest.mark.parametrize(("n", "world"), [(30, 3), (31, 4), (20_000, 2)])
def test_an_epoch_is_the_permutation_with_at_most_a_world_of_padding(n, world):
    lists = [list(ElasticSampler(range(n), world, rank, seed=6)) for rank in range(world)]
    dealt = [index for turn in zip(*lists, strict=True) for index in turn]
    assert dealt[:n] == Permutation(n, 6, 0).block(0, n).tolist()
    assert dealt[n:] == dealt[: len(dealt) - n]
    assert len(dealt) - n < world


def test_no_samples_are_no_indices():
    assert list(ElasticSampler([], 2, 0)) == []


def test_a_changed_world_continues_at_the_others_position():
    """Batches of 4 on each of 3 ranks; after two steps one rank leaves."""
    n, before, done = 59, [], 2
    for rank in range(3):
        loader = DataLoader(range(n), batch_size=4, sampler=ElasticSampler(range(n), 3, rank))
        before += [i for batch in itertools.islice(loader, done) for i in batch.tolist()]
    saved_at = ElasticSampler(range(n), 3, 0)
    saved_at.commit(done * 4 * 3)
    state = saved_at.state_dict()
    after = []
    for rank in range(2):
        sampler = ElasticSampler(range(n), 2, rank)
        sampler.load_state_dict(state)
        after.append(list(sampler))
    rest = [index for turn in zip(*after, strict=True) for index in turn]
    assert sorted(before + rest[: n - len(before)]) == list(range(n))


def test_a_resumed_script_that_names_its_epoch_stays_in_it():
    sampler = ElasticSampler(range(30), 2, 0)
    sampler.set_epoch(3)
    sampler.commit(12)
    other = ElasticSampler(range(30), 2, 0)
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(3)
    assert list(other) == Permutation(30, 0, 3).block(12, 30).tolist()[::2]
    other.set_epoch(4)
    assert len(list(other)) == 15


def test_start_index_is_a_place_in_the_first_epoch_that_is_begun():
    sampler = ElasticSampler(range(30), 1, 0, start_index=20)
    sampler.set_epoch(7)
    assert len(list(sampler)) == len(sampler) == 10
    sampler.set_epoch(8)
    assert len(list(sampler)) == 30
    begun = ElasticSampler(range(30), 1, 0, start_index=20)
    assert len(list(begun)) == 10
    begun.set_epoch(1)
    assert len(list(begun)) == 30


def test_padding_is_not_counted_beyond_the_epoch():
    sampler = ElasticSampler(range(31), 4, 0)
    sampler.commit(32)
    assert sampler.start_index == 31
    assert list(sampler) == []


def test_without_a_process_group_the_world_is_one():
    assert sorted(ElasticSampler(range(9))) == list(range(9))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("num_replicas", {"num_replicas": 0}),
        ("num_replicas", {"num_replicas": 1.0}),
        ("rank", {"num_replicas": 2, "rank": 2}),
        ("rank", {"num_replicas": 2, "rank": -1}),
        ("start_index", {"start_index": 31}),
        ("start_index", {"start_index": -1}),
        ("seed", {"seed": -1}),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(name, arguments):
    with refused("data-size") as raised:
        ElasticSampler(range(30), **arguments)
    assert raised.value.what.startswith(f"{name} is ")


def test_a_dataset_without_a_length_is_refused():
    with refused("data-size") as raised:
        ElasticSampler(iter([1]))
    assert "no length" in raised.value.what


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("n", ElasticSampler(range(31))),
        ("seed", ElasticSampler(range(30), seed=1)),
        ("shuffle", ElasticSampler(range(30), shuffle=False)),
    ],
    ids=["n", "seed", "shuffle"],
)
def test_a_state_of_other_data_is_refused_by_name(key, other):
    sampler = ElasticSampler(range(30))
    sampler.commit(7)
    with refused("data-state") as raised:
        other.load_state_dict(sampler.state_dict())
    assert raised.value.what.startswith(f"{key} is ")
    assert other.start_index == 0
