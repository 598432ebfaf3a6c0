"""Garbage collection is suspended while the zygote imports, and restored afterwards."""

import gc

import pytest

from elastane.process.zygote.server import without_collections


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_suspended_inside_and_enabled_afterwards():
    before, counted = gc.get_threshold(), gc.get_stats()[0]["collections"]
    with without_collections():
        cycles = [[] for _ in range(10 * before[0])]
        for cycle in cycles:
            cycle.append(cycle)
        assert gc.get_stats()[0]["collections"] == counted
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_a_failed_import_restores_the_collections():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), without_collections():
        raise RuntimeError
    assert gc.get_threshold() == before


def test_a_modules_own_threshold_stays():
    with without_collections():
        gc.set_threshold(50_000, 20, 20)
    assert gc.get_threshold() == (50_000, 20, 20)
