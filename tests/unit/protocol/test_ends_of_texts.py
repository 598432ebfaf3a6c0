"""Ends of texts that are cut to a length."""

import pytest

from elastane.protocol.words import last_lines


@pytest.mark.parametrize(
    ("text", "chars", "end"),
    [
        ("one\ntwo", 7, "one\ntwo"),
        ("one\ntwo", 6, "two"),
        ("one\ntwo", 3, "two"),
        ("one\ntwo", 2, "wo"),
        ("one\n\ntwo", 5, "two"),
        ("a long line\n", 5, "line\n"),
        ("", 3, ""),
    ],
)
def test_an_end_has_whole_lines_unless_the_last_is_longer(text, chars, end):
    assert last_lines(text, chars) == end
