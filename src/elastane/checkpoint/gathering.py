"""A sharded state from the memory of several nodes: what a rank lacks comes from who has it.

All ranks say which pieces they lack; each of these is given once, by the first rank whose keeper
has it, and goes straight into the tensors of those who want it. A rank that reads nothing has its
part in this all the same. How it fails: with the collective; CheckpointError, on all ranks alike or
on the one that could not read, where the image is not what was said of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from elastane.checkpoint.layout import Layout, TensorPiece
from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import (
    PARCEL_BYTES,
    Arrived,
    Destination,
    Image,
    Wanted,
    fill_wanted,
    memory_of,
    read_parts,
    wanted_of,
)
from elastane.errors import CheckpointError

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Parcel:
    """Pieces that lie next to each other, and the rank that gives them."""

    source: int
    pieces: list[TensorPiece]
    first: int
    end: int


def gather(
    layout: Layout,
    own: Image | None,
    spans: Sequence[Spans],
    destinations: Sequence[Destination],
    members: Members,
) -> None:
    """Fill the destinations. `own` is what this rank can read; `spans` say it of all, by rank."""
    wanted, why = list[Wanted](), ""
    try:
        wanted = wanted_of(layout, destinations)
    except CheckpointError as error:
        why = str(error)
    mine = spans[members.rank]
    near = [each for each in wanted if _has(mine, layout, each.piece)]
    far: dict[int, list[Wanted]] = {}
    for each in wanted:
        if not _has(mine, layout, each.piece):
            far.setdefault(each.piece.at, []).append(each)
    lacked = _agreed(members, [*far], why)
    if own is not None:
        fill_wanted(layout, own, near)
    _receive(layout, own, [*parcels(layout, lacked, spans)], far, members)


def _agreed(members: Members, lacked: list[int], why: str) -> set[int]:
    """Return where the pieces begin that some rank lacks; CheckpointError where one cannot."""
    said = members.texts(msgspec.msgpack.encode((why, lacked)))
    heard = [msgspec.msgpack.decode(each, type=tuple[str, list[int]]) for each in said]
    reason = next((reason for reason, _ in heard if reason), "")
    if reason:
        raise CheckpointError(
            reason,
            expected="what the ranks want to be in the state",
            next_step="restore it with the model that it was saved of",
            slug="checkpoint-layout",
        )
    return {at for _, some in heard for at in some}


def _receive(
    layout: Layout,
    own: Image | None,
    coming: Sequence[Parcel],
    far: dict[int, list[Wanted]],
    members: Members,
) -> None:
    trouble: Exception | None = None
    for parcel in coming:
        arrived = Arrived(parcel.end - parcel.first, parcel.first)
        if parcel.source == members.rank and own is not None:
            try:
                read_parts(own, parcel.first, memory_of(arrived.data))
            except (OSError, CheckpointError) as error:
                trouble = error  # The others are in the collective already.
        members.spread(arrived.data, parcel.source)
        fill_wanted(layout, arrived, [w for p in parcel.pieces for w in far.get(p.at, ())])
    if trouble is not None:
        raise trouble


def parcels(layout: Layout, lacked: set[int], spans: Sequence[Spans]) -> Iterator[Parcel]:
    """Cut what is lacked into parcels, the same on all ranks."""
    parcel: Parcel | None = None
    for piece in layout.pieces:
        if piece.at not in lacked:
            continue
        source = next((n for n, some in enumerate(spans) if _has(some, layout, piece)), None)
        if source is None:
            raise CheckpointError(
                f"bytes from {piece.at} on are in no keeper's memory",
                expected="a snapshot that is whole on all nodes together",
                next_step="none: an older one is restored",
                slug="checkpoint-layout",
            )
        end = piece.at + layout.frame(piece).size_bytes
        if parcel is not None:
            fits = parcel.source == source and end - parcel.first <= PARCEL_BYTES
            if fits and parcel.end == piece.at:
                parcel = Parcel(source, [*parcel.pieces, piece], parcel.first, end)
                continue
            yield parcel
        parcel = Parcel(source, [piece], piece.at, end)
    if parcel is not None:
        yield parcel


def _has(spans: Spans, layout: Layout, piece: TensorPiece) -> bool:
    end = piece.at + layout.frame(piece).size_bytes
    return any(first <= piece.at and end <= until for first, until in spans)
