"""A deal by speed counts in its world, also in later loops over the steps, and in no other."""

from types import SimpleNamespace

import pytest

from elastane.data.sampler import ElasticBatchSampler
from elastane.worker.mode import Deterministic

EVEN, BY_SPEED = (range(4), range(4, 8)), (range(6), range(6, 8))


@pytest.fixture
def mode():
    made = Deterministic(8, 0)
    made.group = SimpleNamespace(world=object())
    made._cursor = ElasticBatchSampler(100, 16, seed=0).cut_into(8).bind(0, 2)
    made._next_counts = (6, 2)
    return made


def dealt_again(mode):
    mode._cursor.bind(0, 2)
    mode.restore_deal()
    return mode._cursor.dealt


def test_a_deal_counts_from_the_next_step_and_in_later_loops_of_its_world(mode):
    assert mode._cursor.dealt == EVEN
    assert mode.redeal() and mode._cursor.dealt == BY_SPEED
    assert not mode.redeal(), "nothing new was decided"
    assert dealt_again(mode) == BY_SPEED
    mode.group.world = object()
    assert dealt_again(mode) == EVEN, "members of another world know no speeds"


def test_a_step_that_is_retried_decides_anew(mode):
    mode.tracked = SimpleNamespace(generators=[])
    mode.begin(3)
    assert not mode.redeal() and mode._cursor.dealt == EVEN


def test_a_deal_of_other_shards_is_dropped(mode):
    """The next loop accumulates twice as many micro-batches."""
    mode.redeal()
    mode._cursor.cut_into(16)
    assert dealt_again(mode) == (range(8), range(8, 16))
