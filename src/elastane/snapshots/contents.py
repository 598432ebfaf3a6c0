"""The contents of a snapshot besides its slots, collected piece by piece from a node's workers.

Pure values, and the rules that combine pieces: which belong together, which small files they make,
and what of them is written to storage. How it fails: ValueError, in words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

from elastane.protocol.checkpoints import Key
from elastane.snapshots.limits import LAYOUTS_MAX
from elastane.snapshots.messages import (
    HeldPiece,
    LayoutFiles,
    PersistRequest,
    Range,
    Snapshot,
    SnapshotDescription,
)


class Layouts:
    """Layout files by digest: kept while a snapshot refers to them, and the last few anyway."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, LayoutFiles] = OrderedDict()

    def add(self, layout: LayoutFiles) -> None:
        """Add files, or mark known ones as used last."""
        self._by_digest[layout.digest] = layout
        self._by_digest.move_to_end(layout.digest)

    def get(self, digest: str) -> LayoutFiles | None:
        """Return the files of a digest, or None."""
        return self._by_digest.get(digest)

    def trim(self, used: set[str]) -> None:
        """Remove the oldest files that no snapshot uses."""
        unused = [digest for digest in self._by_digest if digest not in used]
        for digest in unused[: max(0, len(unused) - LAYOUTS_MAX)]:
            del self._by_digest[digest]


class Contents:
    """The pieces of one snapshot, by local rank."""

    def __init__(self) -> None:
        self.pieces: dict[int, Snapshot] = {}
        self.began_s = float("inf")  # when the first of its workers began to save
        self.kept_s = 0.0  # when the last of them had kept its piece

    def add(self, piece: Snapshot, now_s: float) -> None:
        """Add a piece that `check` accepted, which is here now."""
        self.pieces[piece.local] = piece
        self.kept_s = now_s
        self.began_s = min(self.began_s, now_s - piece.took_s)

    @property
    def first(self) -> Snapshot:
        """Return the piece of the lowest local rank, whose common fields hold for all."""
        return self.pieces[min(self.pieces)]

    @property
    def layouts(self) -> set[str]:
        """Return the digests of the layouts that it uses."""
        return {piece.layout for piece in self.pieces.values() if piece.layout}

    def check(self, piece: Snapshot, layouts: Layouts) -> None:
        """Raise ValueError for a piece that does not belong to this snapshot."""
        if not piece.first <= piece.end <= piece.image_bytes:
            span = f"bytes {piece.first} to {piece.end}"
            raise ValueError(f"{span} of an image of {piece.image_bytes}")
        if piece.layout and layouts.get(piece.layout) is None:
            raise ValueError(f"layout {piece.layout} was not given before")
        if piece.persist is not None:
            check_where(piece.persist)
        for other in self.pieces.values():
            common = (piece.locals, piece.image_bytes, piece.replicated)
            if common != (other.locals, other.image_bytes, other.replicated):
                raise ValueError("workers disagree on a snapshot: number of workers, image size")

    def files(self, layouts: Layouts) -> dict[str, bytes]:
        """Return all small files; of two with one name, the lower local rank's."""
        found: dict[str, bytes] = {}
        for _, piece in sorted(self.pieces.items(), reverse=True):
            found |= {**_files_of(layouts.get(piece.layout)), **piece.files}
        return found

    def layout_files(self, layouts: Layouts) -> Mapping[str, bytes]:
        """Return the layout files of the lowest local rank that names some."""
        for _, piece in sorted(self.pieces.items()):
            if piece.layout:
                return _files_of(layouts.get(piece.layout))
        return {}

    def own_files(self) -> dict[str, bytes]:
        """Return the files that came with the pieces."""
        return self.files(Layouts())

    def streams(self) -> bytes:
        """Return every worker's streams, as the content of one file."""
        return packed_streams({local: piece.streams for local, piece in self.pieces.items()})

    def words(self, layouts: Layouts, *, verified: bool) -> SnapshotDescription:
        """Return the description of this snapshot that a reading worker receives."""
        pieces, first = sorted(self.pieces.items()), self.first
        return SnapshotDescription(
            key=first.key,
            nonce=first.nonce,
            locals=first.locals,
            image_bytes=first.image_bytes,
            replicated=first.replicated,
            verified=verified,
            layout=next((piece.layout for _, piece in pieces if piece.layout), ""),
            layout_files=dict(self.layout_files(layouts)),
            files=self.own_files(),
            streams={local: piece.streams for local, piece in pieces},
            pieces=tuple(HeldPiece(piece.first, piece.end) for _, piece in pieces),
            final_flush=self.flush_request(layouts),
        )

    def persist(self) -> PersistRequest:
        """Return one write request for this node: that of its workers, with the ranges of each."""
        requests = [piece.persist for _, piece in sorted(self.pieces.items())]
        return joined([request for request in requests if request is not None])

    def _covers(self, ranges: Iterable[Range]) -> bool:
        """Whether the pieces hold every byte of these ranges."""
        spans = sorted((piece.first, piece.end) for piece in self.pieces.values())
        for _, at, end in ranges:
            reached = at
            for begin, until in spans:
                reached = until if begin <= reached < until else reached
            if reached < end:
                return False
        return True

    def flush_request(self, layouts: Layouts) -> PersistRequest | None:
        """Return what the final flush writes; None if it is unknown or the pieces lack some.

        If no final flush was given, it is the pieces' own request, if one server writes all of it.
        """
        known = [layouts.get(piece.layout) for _, piece in sorted(self.pieces.items())]
        given = [
            layout.final_flush
            for layout in known
            if layout is not None and layout.final_flush is not None
        ]
        if given:
            return given[0] if self._covers(given[0].ranges) else None
        if all(piece.persist is not None for piece in self.pieces.values()):
            request = self.persist()
            return request if request.parts == 1 else None
        return None


OpenSnapshot = tuple[SnapshotDescription, list[int]]


def merged(held: Iterable[OpenSnapshot]) -> tuple[list[SnapshotDescription], list[int]]:
    """Return one description per snapshot, newest first, and all their descriptors.

    A node's own part and the replicas of other nodes' parts are joined. The common fields are the
    first part's; pieces and random streams are those of all.
    """
    found: dict[tuple[Key, str], OpenSnapshot] = {}
    for words, descriptors in held:
        name = words.key, words.nonce
        own, before = found.get(name, (words, None))
        if before is None:
            found[name] = words, descriptors
            continue
        more = {len(own.streams) + n: each for n, each in enumerate(words.streams.values())}
        pieces, streams = own.pieces + words.pieces, own.streams | more
        own = msgspec.structs.replace(own, pieces=pieces, streams=streams)
        found[name] = own, before + descriptors
    newest_first = [given for _, given in sorted(found.items(), reverse=True)]
    return [words for words, _ in newest_first], [fd for _, fds in newest_first for fd in fds]


def packed_streams(streams: Mapping[int, bytes]) -> bytes:
    """Return the workers' streams, in the order of local ranks, as the content of one file."""
    return msgspec.msgpack.encode([each for _, each in sorted(streams.items())])


def joined(requests: list[PersistRequest]) -> PersistRequest:
    """Return one request with all ranges; raises ValueError if they contradict each other."""
    first = requests[0]
    ranges: dict[Range, None] = {}
    for request in requests:
        if msgspec.structs.replace(request, ranges=first.ranges) != first:
            raise ValueError("the workers of this node ask for different checkpoints")
        ranges |= dict.fromkeys(request.ranges)
    names = [name for name, _, _ in ranges]
    if len(set(names)) != len(names):
        raise ValueError("the workers of this node put different ranges into one file")
    return msgspec.structs.replace(first, ranges=tuple(ranges))


def check_where(persist: PersistRequest) -> None:
    """Raise ValueError for a path that only the worker could resolve."""
    if "://" not in persist.where and not persist.where.startswith("/"):
        raise ValueError(
            f"{persist.where!r} is no absolute path; the snapshot server has its own current folder"
        )


def _files_of(layout: LayoutFiles | None) -> Mapping[str, bytes]:
    return layout.files if layout is not None else {}
