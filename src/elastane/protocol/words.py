"""Counts in words, as messages and reasons have them. Pure."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
