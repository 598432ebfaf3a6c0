"""Connections that have not authenticated, bounded apart from the authenticated ones.

Every port that strangers can reach counts its unproven connections here. At the bound, the oldest
one is closed for the next, once its minimum time has passed. So silent connections cannot use up
the places of authenticated ones. This module owns no socket: its caller closes the connection that
it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Unproven(Generic[T]):
    """At most `most` connections; each may stay for `min_s`, even if others arrive."""

    def __init__(self, most: int, min_s: float) -> None:
        self._most, self._min_s = most, min_s
        self._since_s: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, one: object) -> bool:
        return one in self._since_s

    def __iter__(self) -> Iterator[T]:
        return iter([*self._since_s])

    @property
    def is_full(self) -> bool:
        """Whether the next connection requires the close of another one."""
        return len(self._since_s) >= self._most

    def wait_s(self, now_s: float) -> float:
        """Return how long the next connection has to wait in the kernel's queue; 0: no wait."""
        if not self.is_full:
            return 0.0
        return max(0.0, next(iter(self._since_s.values())) + self._min_s - now_s)

    def make_room(self) -> T | None:
        """Return the oldest connection, for the caller to close, or None while there is room."""
        if not self.is_full:
            return None
        oldest = next(iter(self._since_s))
        del self._since_s[oldest]
        return oldest

    def add(self, one: T, now_s: float) -> None:
        """Count a connection that was accepted now."""
        assert not self.is_full, "make_room() comes first"
        self._since_s[one] = now_s

    def discard(self, one: T) -> bool:
        """Stop counting a connection that is proven or gone; return whether it was counted."""
        return self._since_s.pop(one, None) is not None
