"""Leaves that are not tensors: an unchanged one is not written again."""

import copy
import io

import pytest
import torch

from elastane.checkpoint.small_files import PlainLeaves, frozen

SAME = [0.1, "name", None, True, b"\0", (0.9, 0.999), [0, 1, 2], ([1], ("x", None)), [], ()]
DIFFERENT = [
    (1, 1.0),
    (True, 1),
    ((1, 2), (1.0, 2)),
    ([1, 2], (1, 2)),
    ([1, 2], [1]),
    (([1],), ([2],)),
    ("1", b"1"),
    (None, False),
]


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_a_value_that_stays_is_written_once(value):
    plain = PlainLeaves()
    first = plain.written({"x": frozen(value)})["x"]
    assert plain.written({"x": frozen(value)})["x"] is first
    assert torch.load(io.BytesIO(first)) == value


@pytest.mark.parametrize(("before", "after"), DIFFERENT, ids=repr)
def test_a_different_value_is_written_again_though_python_calls_it_equal(before, after):
    plain = PlainLeaves()
    plain.written({"x": frozen(before)})
    read = torch.load(io.BytesIO(plain.written({"x": frozen(after)})["x"]))
    assert repr(read) == repr(after)


@pytest.mark.parametrize(
    ("value", "change", "after"),
    [
        ([1, [2]], lambda value: value[1].append(3), [1, [2, 3]]),
        ({"a": 1}, lambda value: value.update(a=2), {"a": 2}),
        ([{"a": 1}], lambda value: value[0].clear(), [{}]),
    ],
    ids=["in a list", "in a dict", "in a dict of a list"],
)
def test_a_leaf_changed_in_place_is_written_with_both_values(value, change, after):
    plain, before = PlainLeaves(), copy.deepcopy(value)
    then = frozen(value)
    change(value)
    assert torch.load(io.BytesIO(plain.written({"x": then})["x"])) == before
    assert torch.load(io.BytesIO(plain.written({"x": frozen(value)})["x"])) == after


def test_an_unpicklable_leaf_is_left_out():
    found = PlainLeaves().written({"x": frozen(1), "y": frozen(lambda: 1)})
    assert set(found) == {"x"}
