"""How many nodes are named in a sentence: it goes to every node, so its length must not grow."""

from __future__ import annotations

import heapq
from collections.abc import Collection

# A person reads no more names than these, and a frame has a bound.
_NAMED_MAX = 8


def named(ids: Collection[str]) -> str:
    """Return `ids` in order, the first of them by name and the others counted."""
    first = ", ".join(heapq.nsmallest(_NAMED_MAX, ids))
    more = len(ids) - _NAMED_MAX
    return f"{first} and {more} more" if more > 0 else first
