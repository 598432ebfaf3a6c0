"""elastane's errors can be sent between processes unchanged."""

from __future__ import annotations

import pickle

import pytest

from elastane import errors


def kinds(root=errors.ElastaneError):
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds(kind)


@pytest.mark.parametrize("kind", list(kinds()))
@pytest.mark.parametrize("protocol", [2, 5])
def test_an_error_survives_a_pickle(kind, protocol):
    error = kind("no", slug="usage", where="w", expected="e", next_step="n")
    error.__notes__ = ["seen"]
    again = pickle.loads(pickle.dumps(error, protocol))
    assert (type(again), str(again), again.args) == (kind, str(error), ("no",))
    assert (again.slug, again.exit_code, again.__notes__) == ("usage", kind.exit_code, ["seen"])
