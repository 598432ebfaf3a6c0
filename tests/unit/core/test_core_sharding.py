"""Which nodes make whole replicas, and what the workers of a node say together."""

import pytest

from elastane.protocol.model import Fence
from elastane.protocol.sharding import NO_PART, Sharding, bounds, of_node, replicas


@pytest.mark.parametrize(
    ("parts", "span", "most", "chosen"),
    [
        ([0, 1, 0, 1], 2, 4, [0, 1, 2, 3]),
        ([1, 0, 1], 2, 4, [0, 1]),
        ([1, 1, 0], 2, 4, [0, 2]),
        ([1, 1, 1], 2, 4, []),
        ([1, 1, NO_PART], 2, 4, [0, 2]),
        ([1, 1, NO_PART, NO_PART], 2, 4, [0, 1, 2, 3]),
        ([1, 1, NO_PART, NO_PART], 2, 3, [0, 2]),
        ([NO_PART, NO_PART, NO_PART], 2, 9, [0, 1]),
        ([0, 1, 2, 0, 1], 3, 9, [0, 1, 2]),
        ([0], 2, 4, []),
        ([], 2, 4, []),
        ([0, 1], 1 << 50, 4, []),
    ],
)
def test_as_many_whole_replicas_as_there_can_be(parts, span, most, chosen):
    assert replicas(parts, span, most) == chosen


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
    assert bounds(low, high, span) == both


def test_the_workers_of_a_node_hold_one_part_together():
    fence = Fence(2, 0)
    one, other = Sharding(span=2, part=1, level=fence), Sharding(span=2, part=1)
    assert of_node([]) is None
    assert of_node([one, one]) == one
    assert of_node([one, other]) == other, "level once all are"
    assert of_node([one, Sharding(span=2)]).part == 1, "who came since takes the others' part"
    assert of_node([one, Sharding(span=2, part=0)]).part == NO_PART
    assert of_node([other, Sharding(sole=True)]).sole
