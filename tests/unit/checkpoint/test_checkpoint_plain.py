"""Leaves that are no tensors: one that has not changed is not written anew."""

import io

import pytest
import torch

from elastane.checkpoint.dcp import Plain

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
    plain = Plain()
    first = plain.written({"x": value})["x"]
    assert plain.written({"x": value})["x"] is first
    assert torch.load(io.BytesIO(first)) == value


@pytest.mark.parametrize(("before", "after"), DIFFERENT, ids=repr)
def test_another_value_is_written_anew_also_where_python_calls_them_equal(before, after):
    plain = Plain()
    plain.written({"x": before})
    read = torch.load(io.BytesIO(plain.written({"x": after})["x"]))
    assert repr(read) == repr(after)


def test_a_list_that_is_changed_in_place_is_written_anew():
    plain, value = Plain(), [1, [2]]
    plain.written({"x": value})
    value[1].append(3)
    assert torch.load(io.BytesIO(plain.written({"x": value})["x"])) == [1, [2, 3]]


def test_what_may_change_unseen_is_written_each_time_and_what_cannot_be_pickled_is_left_out():
    plain, value = Plain(), {"a": 1}
    first = plain.written({"x": value, "y": lambda: 1})
    assert "y" not in first
    assert plain.written({"x": value})["x"] is not first["x"]
