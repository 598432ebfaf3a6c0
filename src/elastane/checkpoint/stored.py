"""The small files of a checkpoint that are ours: its layout, the tree of its state, the streams.

JSON and msgpack, typed and checked: nothing here is ever unpickled, and what is no such file is
told with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from elastane.checkpoint.dcp import Range
from elastane.checkpoint.layout import PAGE_BYTES, Layout, dtype_of
from elastane.errors import CheckpointError

LAYOUT, STATE = "layout.json", "state.msgpack"
T = TypeVar("T")
_decode_list = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_streams = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


class Stored(msgspec.Struct, frozen=True):
    """The state without its tensors. `ranges`: which file holds which part of the image."""

    tree: bytes
    ranges: tuple[Range, ...]
    step: int
    world: int


_decode_layout = msgspec.json.Decoder(Layout).decode
_decode_stored = msgspec.msgpack.Decoder(Stored).decode


def encoded(value: Any) -> bytes:
    """Return a small file's content."""
    if isinstance(value, Layout):
        return msgspec.json.encode(value)
    return msgspec.msgpack.encode(value)


def layout_from(data: bytes) -> Layout:
    """Read a layout; CheckpointError where it is none, or its parts do not fit together."""
    layout = _decoded(_decode_layout, data, LAYOUT)
    at = 0
    for piece in layout.pieces:
        if not at <= piece.at < at + 2 * PAGE_BYTES or not 0 <= piece.tensor < len(layout.tensors):
            raise _unreadable(LAYOUT, f"a piece is said to lie at {piece.at}, not after {at}")
        tensor = layout.tensors[piece.tensor]
        dims = zip(piece.offsets, piece.shape, tensor.shape, strict=False)
        fits = len(piece.offsets) == len(piece.shape) == len(tensor.shape)
        if not fits or any(not 0 <= at <= at + length <= whole for at, length, whole in dims):
            raise _unreadable(LAYOUT, f"a piece is no part of {tensor.name}")
        dtype_of(tensor.dtype)
        at = piece.at + layout.frame(piece).size_bytes
    if not at <= layout.image_bytes < at + PAGE_BYTES:
        raise _unreadable(LAYOUT, f"its pieces end at {at}, not at {layout.image_bytes}")
    return layout


def stored_from(data: bytes) -> Stored:
    """Read what is stored beside the tensors; CheckpointError where it is not that."""
    return _decoded(_decode_stored, data, STATE)


def streams_of(files: Sequence[bytes], rank: int) -> bytes:
    """Return the random streams of a rank from what workers have said; b"" where it said none."""
    found: dict[int, bytes] = {}
    for data in files:
        for packed in _decoded(_decode_list, data, "streams"):
            found |= dict(_decoded(_decode_streams, packed, "streams"))
    return found.get(rank, b"")


def _decoded(decode: Callable[[bytes], T], data: bytes, name: str) -> T:
    try:
        return decode(data)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise _unreadable(name, str(error)) from error


def _unreadable(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be read: {why}",
        expected="what a checkpoint of this version holds",
        next_step="elastane checkpoint verify FOLDER",
        slug="checkpoint-layout",
    )
