"""A series of which the newest items are kept: it equals a tuple that is cut, and never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.observe.recent import Recent


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=50))
def test_a_series_is_the_newest_items_of_a_tuple_and_never_changes(most, grown):
    """Each drawn pair adds an item to one of the series so far, so that series branch."""
    made = [(Recent(most), ())]
    for chosen, item in grown:
        series, items = made[chosen % len(made)]
        made.append((series.after(item), (*items, item)[-most:]))
    for series, items in made:
        assert tuple(series) == items and len(series) == len(items)
        assert series == Recent(most, items) and hash(series) == hash(Recent(most, items))
        assert series[-2:] == items[-2:] and [*reversed(series)] == [*reversed(items)]
        assert [series[at] for at in range(-len(items), len(items))] == [*items, *items]


@pytest.mark.parametrize("index", [2, -3])
def test_an_item_that_is_not_kept_is_no_item(index):
    series = Recent(2, [1, 2, 3]).after(4)
    assert tuple(series) == (3, 4)
    with pytest.raises(IndexError):
        series[index]


def test_a_long_series_keeps_at_most_twice_its_items():
    series = Recent(10)
    for item in range(1000):
        series = series.after(item)
    assert tuple(series) == tuple(range(990, 1000)) and len(series._items) <= 21
