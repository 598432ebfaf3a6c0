"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """Return the name most like `word`, or an empty string where none is like it."""
    import difflib

    near = difflib.get_close_matches(word, list(names), n=1, cutoff=likeness)
    return near[0] if near else ""
