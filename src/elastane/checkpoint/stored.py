"""The small files of a checkpoint that elastane reads: layout, state tree, random streams.

They are JSON and msgpack, typed and checked; nothing is ever unpickled. How it fails:
CheckpointError, which names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from elastane.checkpoint.dcp import ByteRange
from elastane.checkpoint.layout import Layout, misfit
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import Count
from elastane.protocol.limits import CHECKPOINT_FILES_MAX, CHECKPOINT_SMALL_BYTES_MAX
from elastane.protocol.unreadable import UNREADABLE
from elastane.storage import Storage

LAYOUT, STATE = "layout.json", "state.msgpack"
T = TypeVar("T")
_decode_list = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_streams = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


class StoredFiles(msgspec.Struct, frozen=True):
    """The state without its tensors. `ranges` says which file holds which range of the layout."""

    tree: bytes
    ranges: Annotated[tuple[ByteRange, ...], msgspec.Meta(max_length=CHECKPOINT_FILES_MAX)]
    step: Count
    world: Count


_decode_layout = msgspec.json.Decoder(Layout).decode
_decode_stored = msgspec.msgpack.Decoder(StoredFiles).decode


def encoded(value: Any) -> bytes:
    """Return the content of a small file."""
    if isinstance(value, Layout):
        return msgspec.json.encode(value)
    return msgspec.msgpack.encode(value)


def layout_from(data: bytes) -> Layout:
    """Decode a layout; raises CheckpointError if its parts do not fit together."""
    layout = _decoded(_decode_layout, data, LAYOUT)
    if why := misfit(layout):
        raise unreadable(LAYOUT, why)
    return layout


def stored_from(data: bytes) -> StoredFiles:
    """Decode the state tree; raises CheckpointError if it is not one."""
    return _decoded(_decode_stored, data, STATE)


def streams_of(files: Sequence[bytes], rank: int) -> bytes:
    """Return the random streams of a rank from the files of all writers; b"" if it has none."""
    found: dict[int, bytes] = {}
    for data in files:
        for packed in _decoded(_decode_list, data, "streams"):
            found |= dict(_decoded(_decode_streams, packed, "streams"))
    return found.get(rank, b"")


def _decoded(decode: Callable[[bytes], T], data: bytes, name: str) -> T:
    try:
        return decode(data)
    except UNREADABLE as error:
        raise unreadable(name, str(error)) from error


def small_file(storage: Storage, folder: str, name: str) -> bytes:
    """Read a small file; raises CheckpointError, without reading, if it is too large."""
    size_bytes = storage.size(f"{folder}/{name}")
    if size_bytes > CHECKPOINT_SMALL_BYTES_MAX:
        raise unreadable(name, f"{size_bytes} bytes, more than {CHECKPOINT_SMALL_BYTES_MAX}")
    return storage.read(f"{folder}/{name}", 0, size_bytes)


def require_ranges(storage: Storage, folder: str, stored: StoredFiles, layout: Layout) -> None:
    """Raise CheckpointError unless the files hold each byte of the layout once."""
    sizes = storage.sizes(folder, [each.file for each in stored.ranges])
    at = 0
    for file, first, end in sorted(stored.ranges, key=lambda each: (each.first, each.end)):
        if first != at or end < first or sizes.get(file) != end - first:
            raise unreadable(
                STATE,
                f"{file} of {sizes.get(file, 'no')} bytes is said to hold bytes {first} to {end}"
                f" of the image, after {at}",
            )
        at = end
    if at != layout.image_bytes or len({each.file for each in stored.ranges}) < len(stored.ranges):
        raise unreadable(STATE, f"its files hold {at} bytes of an image of {layout.image_bytes}")


def unreadable(name: str, why: str) -> CheckpointError:
    """Return the error for a small file with wrong content."""
    return CheckpointError(
        f"{name} cannot be read: {why}",
        expected="what a checkpoint of this version holds",
        next_step="elastane checkpoint verify FOLDER",
        slug="checkpoint-layout",
    )
