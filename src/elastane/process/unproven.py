"""Connections that have not proved themselves: a bound apart from that of the proven.

Every port that strangers can reach counts its unproven connections here. At the bound, the oldest
one makes room for the next, once it has had its time. So silent connections cannot use up the
places of those that know the secret. It owns no socket: the port's own code closes what is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Unproven(Generic[T]):
    """At most `most` connections, each of which may stay for `patience_s` whoever else comes."""

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._since_s: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, one: object) -> bool:
        return one in self._since_s

    def __iter__(self) -> Iterator[T]:
        return iter([*self._since_s])

    @property
    def is_full(self) -> bool:
        """Whether the next connection needs another one's place."""
        return len(self._since_s) >= self._most

    def wait_s(self, now_s: float) -> float:
        """Return how long the next connection has to wait in the kernel's queue; 0 for not."""
        if not self.is_full:
            return 0.0
        return max(0.0, next(iter(self._since_s.values())) + self._patience_s - now_s)

    def make_room(self) -> T | None:
        """Return the oldest connection, which is to be closed, or None while there is room."""
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
        """Stop counting a connection that is proven or gone; returns whether it was counted."""
        return self._since_s.pop(one, None) is not None
