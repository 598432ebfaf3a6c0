"""The files that let torch alone read a checkpoint: torch.distributed.checkpoint's own index.

`.metadata` is torch's pickle of where each tensor lies; `plain.distcp` holds the leaves that are no
tensors. Both are written for torch's readers, and elastane never reads them. They change seldom:
the index with the layout and with the length of a leaf.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from elastane.checkpoint.layout import Layout, dtype_of
from elastane.protocol.checkpoints import Bytes, FileName

METADATA, PLAIN = ".metadata", "plain.distcp"
_SCALARS = (int, float, str, bytes, bool, type(None))


class ByteRange(NamedTuple):
    """One file of a checkpoint, and the range of the serialized layout in it."""

    file: FileName
    first: Bytes
    end: Bytes


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
