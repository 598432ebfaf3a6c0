"""Where each piece of each tensor lies in the bytes of a state: pure, equal on all ranks.

The serialized layout is a chain of blobs, one for each piece. A piece is contiguous in one tensor,
and small enough to cut the layout into even shares between blobs. A replicated state makes one
layout that each rank could write. Of a sharded state each rank writes what only it holds, and one
of several holders writes the rest. A layout read from storage is not trusted: `misfit` says how its
parts contradict each other.

A blob is a zip file that `torch.load(weights_only=True)` and torch.distributed.checkpoint read. The
bytes around its data depend only on dtype and shape. Hence they are made without the tensor, and
written once around the memory into which each save copies the data. The checksum of the data is
zero: torch does not check it (2.4 to 2.13), and elastane's digests cover the data. Format:
torch/csrc/jit/serialization and caffe2/serialize/inline_container (archive of the records data.pkl,
byteorder, data/0, version; data aligned to 64 bytes).
"""

from __future__ import annotations

import io
import math
import pickle
import secrets
import struct
import sys
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import FILE_BYTES_MAX, PARTS_MAX, Bytes

# Tensors of one state, the pieces into which they are cut (of 4 MiB, so 16 TiB), and dimensions of
# one tensor, which is torch's own bound.
TENSORS_MAX = 1 << 20
PIECES_MAX = 1 << 22
DIMENSIONS_MAX = 64

# Small enough for even shares, large enough that a frame of a thousand bytes does not matter.
PIECE_BYTES = 4 << 20
# Data of at least PAGED_BYTES begins at a page, and its blob in the page before. Hence a disk can
# write pages of memory directly (O_DIRECT), and a process can map the tensors.
PAGE_BYTES = 4096
PAGED_BYTES = 1 << 18
# A Mersenne prime, much greater than the number of values of any tensor: see `_is_tiled`.
_PRIME = (1 << 127) - 1


ALIGN_BYTES = 64
_LOCAL = struct.Struct("<I5H3I2H")
_CENTRAL = struct.Struct("<I6H3I5H2I")
_END = struct.Struct("<I4H2IH")
# An extra field without meaning, the same padding that torch uses.
_PADDING_ID = b"FB"

Dimensions = Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One whole tensor of the state."""

    name: str
    dtype: str
    shape: Dimensions


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tensor, by its number, that one rank holds."""

    tensor: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, and the offset of its blob."""

    tensor: int
    offsets: Dimensions
    shape: Dimensions
    at: Bytes


class Layout(msgspec.Struct, frozen=True):
    """Where the pieces of all tensors lie in the bytes of one saved state.

    `bounds` are the start of each rank's part of a sharded state, and the end.
    """

    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    pieces: Annotated[tuple[TensorPiece, ...], msgspec.Meta(max_length=PIECES_MAX)]
    image_bytes: Bytes
    bounds: Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=PARTS_MAX)] = ()

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole state."""
        return not self.bounds

    def frame(self, piece: TensorPiece) -> Frame:
        """Return the header and the trailer that torch.load expects around the data of a piece."""
        return frame_of(dtype_of(self.tensors[piece.tensor].dtype), piece.shape)

    def data_at(self, piece: TensorPiece) -> int:
        """Return the offset of the data of a piece."""
        return piece.at + len(self.frame(piece).head)

    def within(self, first: int, end: int) -> Sequence[TensorPiece]:
        """Return the pieces whose blobs begin in a range."""
        low = bisect_left(self.pieces, first, key=lambda piece: piece.at)
        return self.pieces[low : bisect_left(self.pieces, end, key=lambda piece: piece.at)]

    def cut(self, parts: int, first: int, end: int) -> list[int]:
        """Cut a range into even parts between blobs, near pages if possible.

        Returns the start of each part, and the end.
        """
        pieces = self.within(first, end)
        edges = [first, *(piece.at for piece in pieces), end]
        paged = [at - at % PAGE_BYTES for at in (p.at for p in pieces if self.is_paged(p))]
        found = [first]
        for part in range(1, parts):
            at = first + (end - first) * part // parts
            edge = _nearest(paged or edges, at)
            found.append(edge if abs(edge - at) <= PIECE_BYTES else _nearest(edges, at))
        return [*found, end]

    def is_paged(self, piece: TensorPiece) -> bool:
        """Whether the data of a piece begins at a page."""
        return self.frame(piece).data_bytes >= PAGED_BYTES


def lay_out(tensors: Sequence[Tensor], held: Sequence[Sequence[Chunk]]) -> Layout:
    """Return the layout of a state of which each rank holds these chunks.

    Raises CheckpointError if chunks of different ranks overlap or leave a part out.
    """
    maker = _LayoutBuilder(tensors)
    if all(list(chunks) == list(held[0]) for chunks in held):
        for chunk in held[0]:
            maker.add(chunk)
        return maker.layout(())
    bounds = [0]
    for chunks in _assign(tensors, held):
        for chunk in chunks:
            maker.add(chunk)
        maker.end_page()
        bounds.append(maker.at)
    layout = maker.layout(tuple(bounds))
    if why := misfit(layout):
        raise CheckpointError(
            f"a sharded state cannot be saved: {why}",
            expected="shards that hold each value of each tensor, and none in part twice",
            next_step="shard it along one dimension for each dimension of the mesh",
            slug="checkpoint-state",
        )
    return layout


class _LayoutBuilder:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._pieces: list[TensorPiece] = []
        self.at = 0

    def add(self, chunk: Chunk) -> None:
        dtype = dtype_of(self._tensors[chunk.tensor].dtype)
        for offsets, shape in _pieces(chunk, dtype.itemsize):
            frame = frame_of(dtype, shape)
            if frame.data_bytes >= PAGED_BYTES:
                self.end_page()
                self.at += -len(frame.head) % PAGE_BYTES
            self._pieces.append(TensorPiece(chunk.tensor, offsets, shape, self.at))
            self.at += frame.size_bytes

    def end_page(self) -> None:
        """Continue at the next page; the gap is zero."""
        self.at += -self.at % PAGE_BYTES

    def layout(self, bounds: tuple[int, ...]) -> Layout:
        return Layout(self._tensors, tuple(self._pieces), self.at, bounds)


def _nearest(edges: Sequence[int], at: int) -> int:
    after = bisect_left(edges, at)
    return min(edges[max(0, after - 1) : after + 1], key=lambda edge: abs(edge - at))


class Box(NamedTuple):
    """A part of a tensor: its offsets and shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _pieces(chunk: Chunk, item_bytes: int) -> Iterator[Box]:
    """Cut a chunk along its first dimension longer than 1, so that each piece is contiguous."""
    whole = math.prod(chunk.shape) * item_bytes
    along = next((d for d, length in enumerate(chunk.shape) if length > 1), None)
    if whole <= PIECE_BYTES or along is None:
        yield Box(chunk.offsets, chunk.shape)
        return
    length = chunk.shape[along]
    step = max(1, length * PIECE_BYTES // whole)
    # Whole pages if possible, so that the pieces can be mapped one after the other.
    in_pages = PAGE_BYTES // math.gcd(whole // length, PAGE_BYTES)
    step -= step % in_pages if step > in_pages else 0
    for first in range(0, length, step):
        offsets, shape = list(chunk.offsets), list(chunk.shape)
        offsets[along] += first
        shape[along] = min(step, length - first)
        part = Chunk(chunk.tensor, tuple(offsets), tuple(shape))
        if step == 1:
            yield from _pieces(part, item_bytes)
        else:
            yield Box(part.offsets, part.shape)


def _assign(tensors: Sequence[Tensor], held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Assign each chunk to the one of its holders that has the fewest bytes so far."""
    holders: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    load, given = [0] * len(held), [list[Chunk]() for _ in held]
    # Chunks with one holder first: the others even the load out.
    for chunk, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=lambda each: (load[each], each))
        given[rank].append(chunk)
        load[rank] += math.prod(chunk.shape) * dtype_of(tensors[chunk.tensor].dtype).itemsize
    return given


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as float32; raises CheckpointError for any other."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the layout of a checkpoint names the kind {name!r}",
            expected="a dtype of the installed torch",
            next_step="restore it with the version of torch that wrote it",
            slug="checkpoint-layout",
        )
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for `dtype_of`."""
    return str(dtype).removeprefix("torch.")


def part_of(tensor: torch.Tensor, piece: TensorPiece, offsets: Sequence[int]) -> torch.Tensor:
    """Return a piece of a tensor that itself begins at `offsets` of a larger one."""
    for dim, (at, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at - offsets[dim], length)
    return tensor


def overlap(one: Box | TensorPiece | Chunk, other: Box | TensorPiece | Chunk) -> Box | None:
    """Return the intersection of two parts of one tensor, or None."""
    offsets, shape = [], []
    places = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    for at, length, other_at, other_length in places:
        first, end = max(at, other_at), min(at + length, other_at + other_length)
        if end <= first:
            return None
        offsets.append(first)
        shape.append(end - first)
    return Box(tuple(offsets), tuple(shape))


class Frame(NamedTuple):
    """What torch.load expects before and after `data_bytes` of a tensor: together, one blob.

    The data is aligned if the blob is.
    """

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
        self.name = name.encode()
        self.data = data
        self.at = 0
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
    """Stands for the memory of a tensor in the pickle: the bytes are another record of the file."""


class _Described:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        stride = torch.empty(self._shape, device="meta").stride()
        rest: tuple[Any, ...] = (0, self._shape, stride, False, OrderedDict())
        if self._dtype in _WITHOUT_STORAGE_CLASS:
            return torch._utils._rebuild_tensor_v3, (_Stored(), *rest, self._dtype)
        return torch._utils._rebuild_tensor_v2, (_Stored(), *rest)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kind: Any, count: int) -> None:
        super().__init__(file, protocol=2)
        self._kind = kind
        self._count = count

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


def misfit(layout: Layout) -> str:
    """Return how the parts of a layout contradict each other or exceed a bound; "" if they do not.

    Callers allocate nothing before that. Each value of each tensor lies in the layout once, so the
    memory that is allocated is filled, and is no larger than the layout.
    """
    if len({tensor.name for tensor in layout.tensors}) != len(layout.tensors):
        return "two tensors have the same name"
    for number, tensor in enumerate(layout.tensors):
        if why := _misfit_of_tensor(tensor):
            return f"tensor {number}: {why}"
    by_tensor: list[list[TensorPiece]] = [[] for _ in layout.tensors]
    at = 0
    for number, piece in enumerate(layout.pieces):
        if why := _misfit_of_piece(layout, piece, at):
            return f"piece {number}: {why}"
        by_tensor[piece.tensor].append(piece)
        at = piece.at + layout.frame(piece).size_bytes
    if not at <= layout.image_bytes < at + PAGE_BYTES:
        return f"its pieces end at {at}, not at {layout.image_bytes}"
    for tensor, pieces in zip(layout.tensors, by_tensor, strict=True):
        if not _is_tiled(tensor.shape, pieces):
            return f"the pieces of {tensor.name} do not hold each of its values once"
    return _misfit_of_bounds(layout)


def _misfit_of_tensor(tensor: Tensor) -> str:
    item_bytes = dtype_of(tensor.dtype).itemsize
    # A length of 0 hides the others in the size, but torch multiplies them all.
    if math.prod(max(1, length) for length in tensor.shape) * item_bytes > FILE_BYTES_MAX:
        return f"its shape {list(tensor.shape)} has more than {FILE_BYTES_MAX} bytes"
    return ""


def _misfit_of_piece(layout: Layout, piece: TensorPiece, at: int) -> str:
    if piece.tensor not in range(len(layout.tensors)):
        return f"it is of tensor {piece.tensor} of {len(layout.tensors)}"
    whole = layout.tensors[piece.tensor].shape
    if not len(piece.offsets) == len(piece.shape) == len(whole):
        return f"it has {len(piece.shape)} dimensions, not {len(whole)}"
    ends = map(int.__add__, piece.offsets, piece.shape)
    if any(end > length for end, length in zip(ends, whole, strict=True)):
        return f"{list(piece.shape)} at {list(piece.offsets)} is no part of {list(whole)}"
    if not at <= piece.at < at + 2 * PAGE_BYTES:
        return f"it is said to lie at {piece.at}, not after {at}"
    if layout.frame(piece).data_bytes > PIECE_BYTES:
        return f"it has {layout.frame(piece).data_bytes} bytes, more than {PIECE_BYTES}"
    return ""


def _misfit_of_bounds(layout: Layout) -> str:
    bounds = list(layout.bounds)
    if bounds and (bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, layout.image_bytes)):
        return f"the parts of its writers do not follow one another up to {layout.image_bytes}"
    return ""


def _is_tiled(whole: Sequence[int], pieces: Sequence[TensorPiece]) -> bool:
    """Whether each value of a tensor lies in exactly one of its pieces.

    A randomized polynomial identity test in linear time, wrong with probability below 2**-70: see
    docs/decisions/polynomial-coverage-check.md.
    """
    if len(pieces) == 1:
        return tuple(pieces[0].shape) == tuple(whole)
    points = [secrets.randbelow(_PRIME - 2) + 2 for _ in whole]
    powers: list[dict[int, int]] = [{} for _ in whole]

    def area(offsets: Sequence[int], shape: Sequence[int]) -> int:
        product = 1
        for point, known, first, length in zip(points, powers, offsets, shape, strict=True):
            for place in (first, first + length):
                if place not in known:
                    known[place] = pow(point, place, _PRIME)
            product = product * (known[first + length] - known[first]) % _PRIME
        return product

    total = sum(area(piece.offsets, piece.shape) for piece in pieces)
    return total % _PRIME == area((0,) * len(whole), whole)


# dtypes added after torch stopped adding storage classes; torch.save treats them the same way.
_WITHOUT_STORAGE_CLASS = frozenset(
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and kind not in torch.storage._dtype_to_storage_type_map()
)
