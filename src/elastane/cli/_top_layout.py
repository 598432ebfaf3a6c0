"""Divides a screen of text between panels; a cut panel says how many entries are missing.

Pure. A panel has a title and entries of one line or more. A stack gives each panel its least number
of lines, and divides the remaining ones line by line among panels that want more. Panels without a
least number, such as empty lines, get lines last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.text import Text

TITLE_STYLE = "bold underline"
GAP = 3


@dataclass(frozen=True)
class ListEntry:
    """One entry of `size` lines, drawn if it is shown; an important one stays in a cut panel."""

    size: int
    draw: Callable[[], Sequence[Text]]
    is_important: bool = False


def entry(*lines: Text) -> ListEntry:
    """Return an entry whose lines are drawn already."""
    return ListEntry(len(lines), lambda: lines)


class Panel(Protocol):
    """A part of the screen."""

    @property
    def least(self) -> int:
        """How many lines the panel gets before other panels get more."""

    def wanted(self, width: int) -> int:
        """Return how many lines the whole panel needs."""

    def drawn(self, width: int, height: int) -> list[Text]:
        """Return at most `height` lines of at most `width` columns."""


@dataclass(frozen=True)
class Listed:
    """A title and entries, which are made for a width."""

    title: Callable[[int], Text]
    entries: Callable[[int], Sequence[ListEntry]]
    least: int = 2

    def wanted(self, width: int) -> int:
        """Return the lines of the title and of all entries."""
        return 1 + sum(one.size for one in self.entries(width))

    def drawn(self, width: int, height: int) -> list[Text]:
        """Return the title and the entries that fit, in their order."""
        entries = self.entries(width)
        if 1 + sum(one.size for one in entries) > height:
            entries = _cut(entries, height - 1)
        lines = [self.title(width), *(line for one in entries for line in one.draw()[: one.size])]
        return [fitted(line, width) for line in lines[: max(0, height)]]


@dataclass(frozen=True)
class Lines:
    """Lines without a title, which are cut at the end."""

    lines: tuple[Text, ...]
    least: int

    def wanted(self, width: int) -> int:
        """Return the number of lines."""
        return len(self.lines)

    def drawn(self, width: int, height: int) -> list[Text]:
        """Return the first lines."""
        return [fitted(line, width) for line in self.lines[: max(0, height)]]


class Stack:
    """Panels one below the other."""

    def __init__(self, *panels: Panel) -> None:
        self._panels = panels
        self.least = sum(panel.least for panel in panels)

    def wanted(self, width: int) -> int:
        """Return the lines of all panels."""
        return sum(panel.wanted(width) for panel in self._panels)

    def drawn(self, width: int, height: int) -> list[Text]:
        """Share the height, then draw the panels."""
        heights = self._shared(width, height)
        drawn = (one.drawn(width, rows) for one, rows in zip(self._panels, heights, strict=True))
        return [line for lines in drawn for line in lines]

    def _shared(self, width: int, height: int) -> list[int]:
        wanted = [panel.wanted(width) for panel in self._panels]
        least = (panel.least for panel in self._panels)
        heights = [min(one, all_) for one, all_ in zip(least, wanted, strict=True)]
        for index in reversed(range(len(heights))):  # on a low screen the last panels are left out
            heights[index] -= min(heights[index], max(0, sum(heights) - height))
        first = {index for index, panel in enumerate(self._panels) if panel.least}
        for sharing in (first, set(range(len(wanted))) - first):  # what may be missing comes last
            while sum(heights) < height and any(heights[at] < wanted[at] for at in sharing):
                for index in sorted(sharing):
                    heights[index] += heights[index] < wanted[index] and sum(heights) < height
        return heights


class Beside:
    """Two panels side by side; the left one has `share` of the width."""

    def __init__(self, left: Panel, right: Panel, share: float) -> None:
        self._left, self._right, self._share = left, right, share
        self.least = max(left.least, right.least)

    def wanted(self, width: int) -> int:
        """Return the lines of the higher panel."""
        left, right = self._widths(width)
        return max(self._left.wanted(left), self._right.wanted(right))

    def drawn(self, width: int, height: int) -> list[Text]:
        """Draw both, and join their lines."""
        left_width, right_width = self._widths(width)
        left = self._left.drawn(left_width, height)
        right = self._right.drawn(right_width, height)
        lines = []
        for index in range(max(len(left), len(right))):
            line = Text.assemble(left[index] if index < len(left) else "")
            if index < len(right):
                line.append(" " * (left_width + GAP - line.cell_len))
                line.append_text(right[index])
            lines.append(line)
        return lines

    def _widths(self, width: int) -> tuple[int, int]:
        left = int((width - GAP) * self._share)
        return left, width - GAP - left


def fitted(line: Text, width: int) -> Text:
    """Return a line that is at most `width` columns long; a cut one ends with an ellipsis."""
    if line.cell_len <= width:
        return line
    cut = line.copy()
    cut.truncate(max(0, width), overflow="ellipsis")
    return cut


def titled(text: str) -> Callable[[int], Text]:
    """Return the title of a panel."""
    return lambda _: Text(text, style=TITLE_STYLE)


def _cut(entries: Sequence[ListEntry], height: int) -> list[ListEntry]:
    """Return the entries that fit, in their order, and a line that counts the others.

    With room for only one line, that is the first line of the first entry.
    """
    left = max(1, height - 1)
    kept: dict[int, ListEntry] = {}
    by_importance = sorted(range(len(entries)), key=lambda at: not entries[at].is_important)
    for index in by_importance:
        if left <= 0:
            break
        one = entries[index]
        kept[index] = ListEntry(min(one.size, left), one.draw)
        left -= one.size
    missing = len(entries) - len(kept)
    has_room = height > 1
    more = [entry(Text(f"  and {missing} more", style="dim"))] if missing and has_room else []
    return [*(kept[index] for index in sorted(kept)), *more]
