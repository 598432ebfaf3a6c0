"""What makes a checkpoint readable by torch alone: torch.distributed.checkpoint's own index.

`.metadata` is torch's pickle of which tensor lies where; `plain.distcp` holds the leaves that are
no tensors. Both are written for torch's readers and never read here. They change seldom: the index
with the layout, and with the length of a leaf.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from elastane.checkpoint.layout import Layout, dtype_of

METADATA, PLAIN = ".metadata", "plain.distcp"
_SCALARS = (int, float, str, bytes, bool, type(None))


class Range(NamedTuple):
    """One file of a checkpoint, and the part of the image that it holds."""

    file: str
    first: int
    end: int


class Plain:
    """The leaves, as torch.save writes them; a leaf that has not changed is not written anew."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[Any, bytes]] = {}

    def written(self, leaves: Mapping[str, Any]) -> dict[str, bytes]:
        """Return each leaf's bytes; one that cannot be pickled is left out."""
        found = {}
        for name, value in leaves.items():
            before = self._written.get(name)
            if before is None or not _equal(before[0], value):
                data = _saved(value)
                if data is None:
                    continue
                before = self._written[name] = (_kept(value), data)
            found[name] = before[1]
        return found


class _Never:
    """Equal to nothing: what it stands for may change unseen."""


def _kept(value: object) -> object:
    """Return a copy of plain data that `_equal` can compare with."""
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_kept, value))
    return value if isinstance(value, _SCALARS) else _Never()


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
    ranges: list[Range],
    leaves: Mapping[str, bytes],
    paths: Mapping[str, tuple[Any, ...]],
) -> bytes:
    """Return `.metadata` of a checkpoint whose image lies in these files."""
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
