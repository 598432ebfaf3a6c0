"""Which nodes make whole replicas, and what the workers of a node report together."""

import pytest

from elastane.protocol.model import (
    NO_SLICE,
    Fence,
    Sharding,
    merge_shardings,
    whole_replicas,
    world_bounds,
)


@pytest.mark.parametrize(
    ("parts", "span", "most", "chosen"),
    [
        ([0, 1, 0, 1], 2, 4, [0, 1, 2, 3]),
        ([1, 0, 1], 2, 4, [0, 1]),
        ([1, 1, 0], 2, 4, [0, 2]),
        ([1, 1, 1], 2, 4, []),
        ([1, 1, NO_SLICE], 2, 4, [0, 2]),
        ([1, 1, NO_SLICE, NO_SLICE], 2, 4, [0, 1, 2, 3]),
        ([1, 1, NO_SLICE, NO_SLICE], 2, 3, [0, 2]),
        ([NO_SLICE, NO_SLICE, NO_SLICE], 2, 9, [0, 1]),
        ([0, 1, 2, 0, 1], 3, 9, [0, 1, 2]),
        ([0], 2, 4, []),
        ([], 2, 4, []),
        ([0, 1], 1 << 50, 4, []),
    ],
)
def test_as_many_whole_replicas_as_there_can_be(parts, span, most, chosen):
    assert whole_replicas(parts, span, most) == chosen


@pytest.mark.parametrize(
    ("low", "high", "span", "both"),
    [
        (1, 4, 1, (1, 4)),
        (1, 4, 2, (2, 4)),
        (3, 5, 2, (4, 4)),
        (3, 3, 2, (2, 2)),
        (1, 1, 2, (2, 2)),
        (2, 8, 4, (4, 8)),
    ],
)
def test_a_range_counts_in_whole_replicas(low, high, span, both):
    assert world_bounds(low, high, span) == both


def test_the_workers_of_a_node_hold_one_part_together():
    fence = Fence(2, 0)
    one, other = Sharding(span=2, part=1, level=fence), Sharding(span=2, part=1)
    assert merge_shardings([]) is None
    assert merge_shardings([one, one]) == one
    assert merge_shardings([one, other]) == other, "level once all are"
    assert merge_shardings([one, Sharding(span=2)]).part == 1, (
        "a newcomer takes the slice of the others"
    )
    assert merge_shardings([one, Sharding(span=2, part=0)]).part == NO_SLICE
    assert merge_shardings([other, Sharding(sole=True)]).sole
