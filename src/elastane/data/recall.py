"""How a loader's process tells its workers that what it asked of them is void.

Owns a number in memory that workers inherit with their fork: what was asked under an older one
is void. A worker that lives on over a rewind
would first read to the end all that was asked of it ahead; so it looks before each sample, and
gives up where nobody waits for it. Where workers are no forks, they read to the end.

Must not know of samples, ranks or steps. Nothing here fails: to give up late is only slow.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import count
from typing import TypeAlias
from weakref import WeakValueDictionary

from elastane.data.streams import begin_streams

__all__ = ["Recall", "RecalledError"]

# Whose a list is, under which number it was asked for, and where its random streams begin.
_Mark: TypeAlias = tuple[tuple[int, int], int, tuple[int, ...]]
_WIDTH = 8
_numbers = count()
# By process and number, so that no worker takes a recall of its own for its loader's.
_known: WeakValueDictionary[tuple[int, int], Recall] = WeakValueDictionary()


class RecalledError(Exception):
    """Raised in a worker, for a batch that nobody waits for any more; nobody sees it."""


class Recall:
    """One for each feed. A copy of one, by pickle or otherwise, is another one."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _WIDTH)
        self.key = (os.getpid(), next(_numbers))
        _known[self.key] = self

    def __reduce__(self) -> tuple[type[Recall], tuple[()]]:
        return Recall, ()

    @property
    def number(self) -> int:
        """How often was recalled."""
        return int.from_bytes(self._page[:_WIDTH], "little")

    def call(self) -> None:
        """Make void all that was asked until now."""
        self._page[:_WIDTH] = (self.number + 1).to_bytes(_WIDTH, "little")

    def check(self, number: int) -> None:
        """Raise RecalledError where what was asked under this number is void."""
        if self.number != number:
            raise RecalledError

    def marked(
        self, lists: Iterator[list[int]], words: Iterator[tuple[int, ...]]
    ) -> Iterator[list[int]]:
        """Give these lists of indices, so that a worker knows when each is void.

        Where a list's words say where random streams begin, they do so there before its samples
        are made: in the worker that gets it, or here.
        """
        return self._marked(self.number, lists, words)

    def _marked(
        self, number: int, lists: Iterator[list[int]], words: Iterator[tuple[int, ...]]
    ) -> Iterator[list[int]]:
        for indices in lists:
            begin = next(words)
            if begin:
                begin_streams(*begin)
            yield MarkedBatch((self.key, number, begin), indices)


class MarkedBatch(list[int]):
    """Indices of a batch. In a worker to go through them ends where they are void."""

    def __init__(self, mark: _Mark, indices: list[int]) -> None:
        super().__init__(indices)
        self._mark = mark
        # Only on the way through a queue: here, in the loader's process, nothing is void.
        self._recall: Recall | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self._mark, list(super().__iter__()))

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        return indices if self._recall is None else self._while_asked(self._recall, indices)

    def _while_asked(self, recall: Recall, indices: Iterator[int]) -> Iterator[int]:
        for index in indices:
            recall.check(self._mark[1])
            yield index


def _received(mark: _Mark, indices: list[int]) -> list[int]:
    key, _, begin = mark
    if begin:
        begin_streams(*begin)
    recall = _known.get(key)
    if recall is None:
        return indices
    marked = MarkedBatch(mark, indices)
    marked._recall = recall
    return marked
