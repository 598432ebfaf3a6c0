"""Where each piece of each tensor lies in the image of a state: pure arithmetic, the same for all.

The image is a chain of blobs (`blobs`), one for each piece; a piece is what is contiguous in one
tensor, and small enough that the image can be cut into even shares between blobs. State that all
ranks hold makes one image, that each of them could write. Of sharded state each rank writes what
only it holds, and what several hold is written by one of them. A layout that is read is not
believed: `misfit` says why its parts contradict each other.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch

from elastane.checkpoint.blobs import Frame, frame_of
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import Bytes
from elastane.protocol.limits import (
    CHECKPOINT_DIMENSIONS_MAX,
    CHECKPOINT_FILE_BYTES_MAX,
    CHECKPOINT_PARTS_MAX,
    CHECKPOINT_PIECES_MAX,
    CHECKPOINT_TENSORS_MAX,
)

# Small enough for even shares, large enough that a thousand bytes around each do not count.
PIECE_BYTES = 4 << 20
# Data of at least the latter begins at a page of the image, and its blob in the page before that,
# where the image can be cut: a disk that is written past its cache takes the pages of memory as
# they lie, and a process that maps them has the tensors as they lie.
PAGE_BYTES = 4096
PAGED_BYTES = 1 << 18
# A Mersenne prime, much greater than the number of values in any tensor: see `_is_tiled`.
_PRIME = (1 << 127) - 1

Dimensions = Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=CHECKPOINT_DIMENSIONS_MAX)]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state, as a whole."""

    name: str
    dtype: str
    shape: Dimensions


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of the tensor of this number."""

    tensor: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, and where its blob begins in the image."""

    tensor: int
    offsets: Dimensions
    shape: Dimensions
    at: Bytes


class Layout(msgspec.Struct, frozen=True):
    """`bounds`: of sharded state, where each rank's own part of the image begins, and the end."""

    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=CHECKPOINT_TENSORS_MAX)]
    pieces: Annotated[tuple[TensorPiece, ...], msgspec.Meta(max_length=CHECKPOINT_PIECES_MAX)]
    image_bytes: Bytes
    bounds: Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=CHECKPOINT_PARTS_MAX)] = ()

    @property
    def replicated(self) -> bool:
        """Whether each rank holds the whole image."""
        return not self.bounds

    def frame(self, piece: TensorPiece) -> Frame:
        """Return what lies around the data of a piece."""
        return frame_of(dtype_of(self.tensors[piece.tensor].dtype), piece.shape)

    def data_at(self, piece: TensorPiece) -> int:
        """Return where the data of a piece begins in the image."""
        return piece.at + len(self.frame(piece).head)

    def within(self, first: int, end: int) -> Sequence[TensorPiece]:
        """Return the pieces whose blobs begin in a range of the image."""
        low = bisect_left(self.pieces, first, key=lambda piece: piece.at)
        return self.pieces[low : bisect_left(self.pieces, end, key=lambda piece: piece.at)]

    def cut(self, parts: int, first: int, end: int) -> list[int]:
        """Return where even parts of a part of the image begin, and its end: between blobs.

        At a page, where one is near.
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
    """Return the layout of a state, of which each rank holds these chunks.

    CheckpointError where chunks of different ranks overlap, or leave a part out.
    """
    maker = _Maker(tensors)
    if all(list(chunks) == list(held[0]) for chunks in held):
        for chunk in held[0]:
            maker.add(chunk)
        return maker.layout(())
    bounds = [0]
    for chunks in _shared_out(tensors, held):
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


def misfit(layout: Layout) -> str:
    """Return why the parts of a layout contradict each other or a bound; "" where they do not.

    Nothing is allocated before this has said "". Each value of each tensor lies in the image once,
    so memory that is read into is filled, and is no larger than the image.
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
    # A length of 0 hides the others from the size, and torch multiplies them all the same.
    if (
        math.prod(max(1, length) for length in tensor.shape) * item_bytes
        > CHECKPOINT_FILE_BYTES_MAX
    ):
        return f"its shape {list(tensor.shape)} has more than {CHECKPOINT_FILE_BYTES_MAX} bytes"
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
        return f"the parts of its writers are not one behind the other up to {layout.image_bytes}"
    return ""


def _is_tiled(whole: Sequence[int], pieces: Sequence[TensorPiece]) -> bool:
    """Whether each value of a tensor lies in one of its pieces, and in one only.

    Comparing pieces in pairs is quadratic. As a polynomial, the value at (i, j) is x**i * y**j, and
    a box of them is (x**end - x**first) * (y**end - y**first) / ((x - 1) * (y - 1)). The sum of the
    pieces equals the whole exactly if each value is counted once. Both are compared at a random
    point modulo a prime, which takes unequal ones for equal with a probability below 2**-70.
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


class _Maker:
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
        """Go on at the next page; what lies between is zero."""
        self.at += -self.at % PAGE_BYTES

    def layout(self, bounds: tuple[int, ...]) -> Layout:
        return Layout(self._tensors, tuple(self._pieces), self.at, bounds)


def _nearest(edges: Sequence[int], at: int) -> int:
    after = bisect_left(edges, at)
    return min(edges[max(0, after - 1) : after + 1], key=lambda edge: abs(edge - at))


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _pieces(chunk: Chunk, item_bytes: int) -> Iterator[Box]:
    """Cut a chunk along its first dimension that is not 1, so that each piece is contiguous."""
    whole = math.prod(chunk.shape) * item_bytes
    along = next((d for d, length in enumerate(chunk.shape) if length > 1), None)
    if whole <= PIECE_BYTES or along is None:
        yield Box(chunk.offsets, chunk.shape)
        return
    length = chunk.shape[along]
    step = max(1, length * PIECE_BYTES // whole)
    # As many as fill whole pages: then the pieces can be mapped one behind the other.
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


def _shared_out(tensors: Sequence[Tensor], held: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Give each chunk to one of the ranks that hold it: to the one that has the least so far."""
    holders: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    load, given = [0] * len(held), [list[Chunk]() for _ in held]
    # Those that only one rank holds come first: the others fill up what is uneven.
    for chunk, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=lambda each: (load[each], each))
        given[rank].append(chunk)
        load[rank] += math.prod(chunk.shape) * dtype_of(tensors[chunk.tensor].dtype).itemsize
    return given


def overlap(one: Box | TensorPiece | Chunk, other: Box | TensorPiece | Chunk) -> Box | None:
    """Return what two parts of one tensor have in common."""
    offsets, shape = [], []
    places = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    for at, length, other_at, other_length in places:
        first, end = max(at, other_at), min(at + length, other_at + other_length)
        if end <= first:
            return None
        offsets.append(first)
        shape.append(end - first)
    return Box(tuple(offsets), tuple(shape))


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as float32; CheckpointError for any other."""
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
    """Return the name that `dtype_of` takes."""
    return str(dtype).removeprefix("torch.")
