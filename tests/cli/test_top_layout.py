"""The layout of a screen: each panel gets its minimum, then the panels share spare lines."""

from dataclasses import replace

from rich.text import Text

from elastane.cli._top_layout import Beside, Lines, Listed, Stack, entry, titled


def listed(title, *sizes, least=2, important=()):
    entries = [
        replace(
            entry(*(Text(f"{title}{number}.{line}") for line in range(size))),
            is_important=number in important,
        )
        for number, size in enumerate(sizes)
    ]
    return Listed(titled(title), lambda _: entries, least)


def drawn(panel, width, height):
    return [line.plain for line in panel.drawn(width, height)]


def test_a_panel_that_fits_is_shown_whole():
    panel = listed("a", 1, 2)
    assert panel.wanted(9) == 4
    assert drawn(panel, 9, 4) == ["a", "a0.0", "a1.0", "a1.1"]


def test_a_cut_panel_keeps_important_entries_and_counts_the_others():
    assert drawn(listed("a", 1, 1, 1, 1), 20, 4) == ["a", "a0.0", "a1.0", "  and 2 more"]
    cut = drawn(listed("a", 1, 1, 1, 1, important={3}), 20, 4)
    assert cut == ["a", "a0.0", "a3.0", "  and 2 more"]


def test_an_entry_that_does_not_fit_shows_its_first_lines():
    assert drawn(listed("a", 3, 1), 20, 3) == ["a", "a0.0", "  and 1 more"]
    assert drawn(listed("a", 3, 1), 20, 2) == ["a", "a0.0"]
    assert drawn(listed("a", 3, 1), 20, 1) == ["a"]
    assert drawn(listed("a", 3, 1), 20, 0) == []


def test_spare_lines_go_to_the_panels_in_turn():
    stack = Stack(listed("a", *[1] * 9), listed("b", 1, 1), listed("c", *[1] * 9))
    rows = drawn(stack, 20, 13)
    assert [row for row in rows if row in "abc"] == ["a", "b", "c"]
    assert (rows.index("b"), rows.index("c")) == (5, 8)


def test_a_low_screen_omits_the_last_panels():
    stack = Stack(listed("a", 1, 1), listed("b", 1, 1), Lines((Text("c"),), least=1))
    assert drawn(stack, 20, 3) == ["a", "a0.0", "b"]
    assert drawn(stack, 20, 0) == []


def test_panels_side_by_side_keep_their_columns_with_wide_characters_too():
    left = Lines((Text("学習"), Text("a long line of the left")), least=1)
    rows = Beside(left, Lines(tuple(map(Text, "xyz")), least=1), 0.5).drawn(23, 9)
    assert [row.plain for row in rows] == ["学習         x", "a long li…   y", "             z"]
    assert {row.cell_len for row in rows} == {14}
