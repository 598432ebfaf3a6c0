"""The bytes that torch.save writes around a tensor's data, made without the tensor.

A blob is a zip file that `torch.load(weights_only=True)` and torch.distributed.checkpoint read. It
depends only on dtype and shape. Hence it is written once around the memory into which each save
copies the data. The checksum of the data is zero: torch does not check it (2.4 to 2.13), and
elastane's digests cover the data.

Format: torch/csrc/jit/serialization and caffe2/serialize/inline_container (archive of the records
data.pkl, byteorder, data/0, version; data aligned to 64 bytes).
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

ALIGN_BYTES = 64
_LOCAL = struct.Struct("<I5H3I2H")
_CENTRAL = struct.Struct("<I6H3I5H2I")
_END = struct.Struct("<I4H2IH")
# An extra field without meaning, the same padding that torch uses.
_PADDING_ID = b"FB"


class Frame(NamedTuple):
    """The bytes around `data_bytes` of data, which is aligned if the blob is."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """The size of the whole blob, a multiple of ALIGN_BYTES."""
        return len(self.head) + self.data_bytes + len(self.tail)


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a contiguous CPU tensor."""
    count = 1
    for length in shape:
        count *= length
    data_bytes = count * dtype.itemsize
    records = [
        _Record("archive/data.pkl", _description(dtype, shape, count)),
        _Record("archive/version", b"3\n"),
        _Record("archive/byteorder", sys.byteorder.encode()),
    ]
    head = b""
    for record in records:
        record.at = len(head)
        head += record.local(0) + record.data
    data = _Record("archive/data/0", b"", data_bytes)
    data.at = len(head)
    bare = len(head) + len(data.local(0))
    head += data.local(-bare % ALIGN_BYTES or ALIGN_BYTES)
    tail = _directory([*records, data], len(head) + data_bytes)
    return Frame(head, data_bytes, tail)


class _Record:
    def __init__(self, name: str, data: bytes, data_bytes: int | None = None) -> None:
        self.name, self.data, self.at = name.encode(), data, 0
        self.size = len(data) if data_bytes is None else data_bytes
        self._crc = zlib.crc32(data) if data_bytes is None else 0

    def local(self, padding: int) -> bytes:
        """Return the header before the data, extended by about `padding` bytes."""
        if 0 < padding < 4:
            padding += ALIGN_BYTES
        extra = b""
        if padding:
            extra = _PADDING_ID + struct.pack("<H", padding - 4) + bytes(padding - 4)
        fields = (0x04034B50, 20, 0, 0, 0, 0, self._crc, self.size, self.size)
        return _LOCAL.pack(*fields, len(self.name), len(extra)) + self.name + extra

    def central(self) -> bytes:
        """Return the entry in the directory."""
        fields = (0x02014B50, 20, 20, 0, 0, 0, 0, self._crc, self.size, self.size)
        return _CENTRAL.pack(*fields, len(self.name), 0, 0, 0, 0, 0, self.at) + self.name


def _directory(records: Sequence[_Record], at: int) -> bytes:
    """Return the end of the file; its comment pads it so that the next blob is aligned."""
    entries = b"".join(record.central() for record in records)
    comment = bytes(-(at + len(entries) + _END.size) % ALIGN_BYTES)
    count = len(records)
    return (
        entries
        + _END.pack(0x06054B50, 0, 0, count, count, len(entries), at, len(comment))
        + comment
    )


class _Stored:
    """A placeholder for the memory of the tensor, which is a record of its own."""


class _Described:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        stride = torch.empty(self._shape, device="meta").stride()
        rest: tuple[Any, ...] = (0, self._shape, stride, False, OrderedDict())
        if self._dtype in _WITHOUT_STORAGE_CLASS:
            return torch._utils._rebuild_tensor_v3, (_Stored(), *rest, self._dtype)
        return torch._utils._rebuild_tensor_v2, (_Stored(), *rest)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kind: Any, count: int) -> None:
        super().__init__(file, protocol=2)
        self._kind, self._count = kind, count

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Stored):
            return "storage", self._kind, "0", "cpu", self._count
        return None


def _description(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> bytes:
    file = io.BytesIO()
    if dtype in _WITHOUT_STORAGE_CLASS:
        kind, count = torch.UntypedStorage, count * dtype.itemsize
    else:
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
    _Pickler(file, kind, count).dump(_Described(dtype, shape))
    return file.getvalue()


# dtypes added after torch stopped adding storage classes; torch.save treats them the same way.
_WITHOUT_STORAGE_CLASS = frozenset(
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and kind not in torch.storage._dtype_to_storage_type_map()
)
