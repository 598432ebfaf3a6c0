"""Lets a loader's workers drop the batches that were requested before a rewind.

Owns a number in memory that workers inherit by fork: requests under an older number are void. A
worker that survives a rewind would otherwise first read all batches that were requested ahead. So a
worker checks the number before each sample, and drops a void batch. Workers that are not forked
read all of them.

The module knows nothing of samples, ranks or steps. It cannot fail: dropping late is only slow.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import count
from typing import TypeAlias
from weakref import WeakValueDictionary

from elastane.data.random_streams import begin_streams

# For a list of indices: its Recall, the number under which it was requested, and its seed words.
_Mark: TypeAlias = tuple[tuple[int, int], int, tuple[int, ...]]
_WIDTH = 8
_numbers = count()
# Recalls by process and number, so that a worker does not use its own for that of its loader.
_known: WeakValueDictionary[tuple[int, int], Recall] = WeakValueDictionary()


class RecalledError(Exception):
    """Raised in a worker for a void batch; it never reaches the user."""


class Recall:
    """Tells the loader workers of one feed which requests are void; a copy is another feed's."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _WIDTH)
        self.key = (os.getpid(), next(_numbers))
        _known[self.key] = self

    def __reduce__(self) -> tuple[type[Recall], tuple[()]]:
        return Recall, ()

    @property
    def number(self) -> int:
        """How often `call` was called; workers see the new number at once."""
        return int.from_bytes(self._page[:_WIDTH], "little")

    def call(self) -> None:
        """Make all earlier requests void."""
        self._page[:_WIDTH] = (self.number + 1).to_bytes(_WIDTH, "little")

    def check(self, number: int) -> None:
        """Raise RecalledError if requests under this number are void."""
        if self.number != number:
            raise RecalledError

    def marked(
        self, lists: Iterator[list[int]], words: Iterator[tuple[int, ...]]
    ) -> Iterator[list[int]]:
        """Yield these lists so that a worker detects when each is void.

        A list's words, if any, seed the random streams before its samples are made, in the worker
        or in this process.
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
    """The indices of a batch; iterating over them in a worker ends if they are void."""

    def __init__(self, mark: _Mark, indices: list[int]) -> None:
        super().__init__(indices)
        self._mark = mark
        # Set when a worker gets the list: in the loader's own process no list is void.
        self._recall: Recall | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self._mark, list(super().__iter__()))

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        return indices if self._recall is None else self._checked(self._recall, indices)

    def _checked(self, recall: Recall, indices: Iterator[int]) -> Iterator[int]:
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
