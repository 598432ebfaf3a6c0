"""Untrusted bytes: what a decoder raises for them, as one tuple for all their readers.

Text that is not UTF-8 gives a ValueError that is not msgspec's own. Endless nesting gives a
RecursionError, also in fields that the type does not have (measured with msgspec 0.22).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def decoded(decode: Callable[[bytes], T], frame: bytes, kind: str) -> T:
    """Decode a message of this `kind`; raises ValueError, in words, for any other bytes."""
    try:
        return decode(frame)
    except UNREADABLE as error:
        raise ValueError(f"no {kind} of this version: {error}") from error
