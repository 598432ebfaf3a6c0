"""The mesh coordinates that workers get when the world changes."""

from __future__ import annotations

import itertools

import pytest

from elastane.comms.mesh import NO_COORDINATE, assign_coordinates
from elastane.errors import JobError

NEW = NO_COORDINATE


@pytest.mark.parametrize(
    ("claims", "nodes", "shards", "expected"),
    [
        ([NEW, NEW, NEW, NEW], "aabb", 2, [0, 1, 2, 3]),
        ([3, NEW, 0, 1], "bbaa", 2, [3, 2, 0, 1]),  # a replacement takes the free coordinate
        ([2, 3], "bb", 2, [0, 1]),  # the replica that is left becomes the first
        ([4, 5, 2, 3], "ccbb", 2, [0, 1, 2, 3]),
        ([0, 1, NEW, NEW, NEW, NEW], "aabbcc", 2, [0, 1, 2, 3, 4, 5]),
        ([0, 3], "ab", 2, [0, 1]),  # of two replicas, each with one loss
        (
            [0, 1, 0, 1],
            "aabb",
            2,
            [0, 1, 2, 3],
        ),  # a node comes back, whose coordinates others have now
        ([5, 5, 5], "abc", 1, [0, 1, 2]),
    ],
)
def test_holders_keep_their_shard_and_others_get_free_ones(claims, nodes, shards, expected):
    assert assign_coordinates(claims, [*map(ord, nodes)], shards) == expected


@pytest.mark.parametrize(
    ("claims", "nodes", "expected"),
    [
        ([3, NEW, 0, NEW], "bbaa", [3, 2, 0, 1]),  # both nodes lost a worker at once
        ([0, 3, NEW, NEW], "abba", [0, 3, 2, 1]),
        ([4, 5, NEW, NEW, NEW, NEW], "aabcbc", [4, 5, 0, 2, 1, 3]),
        ([9, 8, NEW, NEW], "aabb", [1, 0, 2, 3]),  # their replica is not of this world
        ([0, 8, NEW, NEW], "abba", [0, 2, 3, 1]),
    ],
)
def test_workers_of_a_node_come_into_one_replica(claims, nodes, expected):
    assert assign_coordinates(claims, [*map(ord, nodes)], 2) == expected


def test_more_holders_of_a_shard_than_replicas_are_refused():
    with pytest.raises(JobError, match="shard 0 is held by ranks 0, 1, and a world of 2 workers"):
        assign_coordinates([0, 2], [1, 2], 2)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_in_every_world_each_coordinate_is_given_once_or_a_shard_has_too_many_holders(shards):
    for replicas in (1, 2):
        size = shards * replicas
        for claims in itertools.product([NEW, *range(2 * shards + 1)], repeat=min(size, 4)):
            claimed = [*claims, *[NEW] * (size - len(claims))]
            held = [claim % shards for claim in claimed if claim != NEW]
            if any(held.count(shard) > replicas for shard in held):
                with pytest.raises(JobError, match="is held by ranks"):
                    assign_coordinates(claimed, [0] * size, shards)
                continue
            coordinates = assign_coordinates(claimed, [0] * size, shards)
            assert sorted(coordinates) == [*range(size)]
            for coordinate, claim in zip(coordinates, claimed, strict=True):
                assert claim == NEW or coordinate % shards == claim % shards
                if claim != NEW and claim < size and claimed.count(claim) == 1:
                    assert coordinate == claim
