"""The small files of a checkpoint: those that elastane reads, and those that torch alone reads.

elastane reads the layout, the state tree and the random streams. They are JSON and msgpack, typed
and checked; nothing is ever unpickled. How it fails: CheckpointError, which names the file.

`.metadata` is torch.distributed.checkpoint's own index, a pickle of where each tensor lies;
`plain.distcp` holds the leaves that are no tensors. Both are written for torch's readers, and
elastane never reads them. They change seldom: the index with the layout and the length of a leaf.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import torch

from elastane.checkpoint.layout import Layout, dtype_of, misfit
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import FILES_MAX, Bytes, Count, FileName
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.limits import REQUEST_BYTES_MAX
from elastane.storage import Storage

# A worker sends the small files in one request. A reader refuses a larger one before it reads any
# of it.
SMALL_BYTES_MAX = REQUEST_BYTES_MAX

METADATA, PLAIN = ".metadata", "plain.distcp"

LAYOUT, STATE = "layout.json", "state.msgpack"
_SCALARS = (int, float, str, bytes, bool, type(None))
T = TypeVar("T")
_decode_list = msgspec.msgpack.Decoder(list[bytes]).decode
_decode_streams = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


class ByteRange(NamedTuple):
    """One file of a checkpoint, and the range of the serialized layout in it."""

    file: FileName
    first: Bytes
    end: Bytes


class StoredFiles(msgspec.Struct, frozen=True):
    """The state without its tensors. `ranges` says which file holds which range of the layout."""

    tree: bytes
    ranges: Annotated[tuple[ByteRange, ...], msgspec.Meta(max_length=FILES_MAX)]
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
    if size_bytes > SMALL_BYTES_MAX:
        raise unreadable(name, f"{size_bytes} bytes, more than {SMALL_BYTES_MAX}")
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


class PlainLeaves:
    """The leaves as torch.save writes them; unchanged leaves are not written again."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[Any, bytes]] = {}

    def written(self, leaves: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the bytes of each frozen leaf, without those that cannot be pickled."""
        found = {}
        for name, value in leaves.items():
            before = self._written.get(name)
            if before is None or not _equal(before[0], value):
                data = value.data if isinstance(value, _Pickled) else _saved(value)
                if data is None:
                    continue
                before = self._written[name] = (value, data)
            found[name] = before[1]
        return found


class _Pickled(NamedTuple):
    """The bytes of a leaf that is no plain data; None if it cannot be pickled."""

    data: bytes | None


def frozen(leaf: Any) -> Any:
    """Return an immutable copy of a leaf: plain data, or its pickled bytes."""
    if type(leaf) in _SCALARS:
        return leaf
    if (type(leaf) is list or type(leaf) is tuple) and _is_plain(leaf):
        return type(leaf)(map(frozen, leaf))
    return _Pickled(_saved(leaf))


def _is_plain(value: Any) -> bool:
    if type(value) is list or type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _SCALARS


def _equal(kept: object, value: object) -> bool:
    if type(kept) is not type(value):
        return False
    if isinstance(kept, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(kept) == len(value) and all(map(_equal, kept, value))
    return kept == value


def _saved(value: Any) -> bytes | None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return file.getvalue()


def metadata(
    layout: Layout,
    ranges: list[ByteRange],
    leaves: Mapping[str, bytes],
    paths: Mapping[str, tuple[Any, ...]],
) -> bytes:
    """Return `.metadata` of a checkpoint whose serialized layout lies in these files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    items: dict[str, Any] = {t.name: _tensor(t.dtype, t.shape) for t in layout.tensors}
    places: dict[Any, Any] = {}
    for each in ranges:
        for piece in layout.within(each.first, each.end):
            name = layout.tensors[piece.tensor].name
            chunks = items[name].chunks
            index = MetadataIndex(name, torch.Size(piece.offsets), len(chunks))
            size = layout.frame(piece).size_bytes
            places[index] = _StorageInfo(each.file, piece.at - each.first, size)
            chunks.append(_chunk(piece.offsets, piece.shape))
    at = 0
    for name, data in leaves.items():
        items[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(PLAIN, at, len(data))
        at += len(data)
    named = {name: paths.get(name, (name,)) for name in items}
    return pickle.dumps(Metadata(items, named, places, StorageMeta()))


def _tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    properties = TensorProperties(dtype=dtype_of(dtype))
    return TensorStorageMetadata(properties, torch.Size(shape), [])


def _chunk(offsets: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
