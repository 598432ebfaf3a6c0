"""Restores a sharded state from the memory of several nodes: each rank gets the pieces it lacks.

All ranks say which pieces they lack. The first rank whose server holds a piece broadcasts it once,
straight into the tensors of the ranks that want it. A rank that needs nothing takes part too. How
it fails: as the collective does; CheckpointError on all ranks, or on the rank that could not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from elastane.checkpoint.layout import Layout, TensorPiece
from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import (
    PARCEL_BYTES,
    ByteSource,
    Destination,
    ReadRequest,
    ReceivedBytes,
    fill_requests,
    memory_of,
    read_parts,
    requests_of,
)
from elastane.errors import CheckpointError

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Parcel:
    """Adjacent pieces, and the rank that sends them."""

    source: int
    pieces: list[TensorPiece]
    first: int
    end: int


def gather(
    layout: Layout,
    own: ByteSource | None,
    spans: Sequence[Spans],
    destinations: Sequence[Destination],
    members: Members,
) -> None:
    """Fill the destinations. `own` is readable by this rank; `spans` are those of all ranks."""
    wanted, why = list[ReadRequest](), ""
    try:
        wanted = requests_of(layout, destinations)
    except CheckpointError as error:
        why = str(error)
    mine = spans[members.rank]
    near = [each for each in wanted if _has(mine, layout, each.piece)]
    far: dict[int, list[ReadRequest]] = {}
    for each in wanted:
        if not _has(mine, layout, each.piece):
            far.setdefault(each.piece.at, []).append(each)
    lacked = _exchange(members, [*far], why)
    if own is not None:
        fill_requests(layout, own, near)
    _receive(layout, own, [*parcels(layout, lacked, spans)], far, members)


def _exchange(members: Members, lacked: list[int], why: str) -> set[int]:
    """Return the offsets of pieces that some rank lacks; CheckpointError if one has failed."""
    received = members.texts(msgspec.msgpack.encode((why, lacked)))
    decoded = [msgspec.msgpack.decode(each, type=tuple[str, list[int]]) for each in received]
    reason = next((reason for reason, _ in decoded if reason), "")
    if reason:
        raise CheckpointError(
            reason,
            expected="a checkpoint that has the values that the ranks need",
            next_step="restore it with the model that it was saved of",
            slug="checkpoint-layout",
        )
    return {at for _, some in decoded for at in some}


def _receive(
    layout: Layout,
    own: ByteSource | None,
    coming: Sequence[Parcel],
    far: dict[int, list[ReadRequest]],
    members: Members,
) -> None:
    failure: Exception | None = None
    for parcel in coming:
        arrived = ReceivedBytes(parcel.end - parcel.first, parcel.first)
        if parcel.source == members.rank and own is not None:
            try:
                read_parts(own, parcel.first, memory_of(arrived.data))
            except (OSError, CheckpointError) as error:
                failure = error  # The other ranks are in the collective already.
        members.spread(arrived.data, parcel.source)
        fill_requests(layout, arrived, [w for p in parcel.pieces for w in far.get(p.at, ())])
    if failure is not None:
        raise failure


def parcels(layout: Layout, lacked: set[int], spans: Sequence[Spans]) -> Iterator[Parcel]:
    """Group the lacking pieces into parcels, the same on all ranks."""
    parcel: Parcel | None = None
    for piece in layout.pieces:
        if piece.at not in lacked:
            continue
        source = next((n for n, some in enumerate(spans) if _has(some, layout, piece)), None)
        if source is None:
            raise CheckpointError(
                f"bytes from {piece.at} on are in no node's memory",
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
