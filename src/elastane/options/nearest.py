"""Finds the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """Return the name most similar to `word`, or an empty string if none is similar."""
    import difflib

    near = difflib.get_close_matches(word, list(names), n=1, cutoff=likeness)
    return near[0] if near else ""
