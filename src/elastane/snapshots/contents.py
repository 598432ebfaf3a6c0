"""What a snapshot consists of beside its slots, as the workers of a node gave it piece by piece.

Pure values and the rules by which pieces are put together: whether they belong together, which
small files they make, what is to be written of them. How it fails: ValueError, in words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import KEEPER_LAYOUTS_MAX
from elastane.snapshots.messages import (
    HeldPiece,
    HeldWords,
    LayoutFiles,
    PersistRequest,
    Range,
    Snapshot,
)


class Layouts:
    """What was given by digest: kept while a snapshot refers to it, and the last few anyway."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, LayoutFiles] = OrderedDict()

    def add(self, layout: LayoutFiles) -> None:
        """Take one in; given again, it is as new."""
        self._by_digest[layout.digest] = layout
        self._by_digest.move_to_end(layout.digest)

    def get(self, digest: str) -> LayoutFiles | None:
        """Return one; None where none was given, or none is needed."""
        return self._by_digest.get(digest)

    def trim(self, used: set[str]) -> None:
        """Forget the oldest of those that nothing refers to."""
        unused = [digest for digest in self._by_digest if digest not in used]
        for digest in unused[: max(0, len(unused) - KEEPER_LAYOUTS_MAX)]:
            del self._by_digest[digest]


class Contents:
    """One snapshot's, by local worker."""

    def __init__(self) -> None:
        self.pieces: dict[int, Snapshot] = {}

    @property
    def first(self) -> Snapshot:
        """Return the piece of the lowest local worker, which speaks for all."""
        return self.pieces[min(self.pieces)]

    @property
    def layouts(self) -> set[str]:
        """Return the digests that it refers to."""
        return {piece.layout for piece in self.pieces.values() if piece.layout}

    def check(self, piece: Snapshot, layouts: Layouts) -> None:
        """Raise ValueError for a piece that is not one of this snapshot."""
        if not piece.first <= piece.end <= piece.image_bytes:
            span = f"bytes {piece.first} to {piece.end}"
            raise ValueError(f"{span} of an image of {piece.image_bytes}")
        if piece.layout and layouts.get(piece.layout) is None:
            raise ValueError(f"layout {piece.layout} was not given before")
        if piece.persist is not None:
            check_where(piece.persist)
        for other in self.pieces.values():
            said = (piece.locals, piece.image_bytes, piece.replicated)
            if said != (other.locals, other.image_bytes, other.replicated):
                raise ValueError("workers say different things of one snapshot: locals, image size")

    def files(self, layouts: Layouts) -> dict[str, bytes]:
        """Return all small files; where two gave one of a name, it is the lower worker's."""
        found: dict[str, bytes] = {}
        for _, piece in sorted(self.pieces.items(), reverse=True):
            found |= {**_files_of(layouts.get(piece.layout)), **piece.files}
        return found

    def layout_files(self, layouts: Layouts) -> Mapping[str, bytes]:
        """Return the files that were given by the digest of the lowest worker that has one."""
        for _, piece in sorted(self.pieces.items()):
            if piece.layout:
                return _files_of(layouts.get(piece.layout))
        return {}

    def own_files(self) -> dict[str, bytes]:
        """Return the files that came with the pieces."""
        return self.files(Layouts())

    def streams(self) -> bytes:
        """Return what each worker has of its own, as the content of one file."""
        return packed_streams({local: piece.streams for local, piece in self.pieces.items()})

    def words(self, layouts: Layouts, *, verified: bool) -> HeldWords:
        """Return what a reader is told of it."""
        pieces, first = sorted(self.pieces.items()), self.first
        return HeldWords(
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
            gasp=self.gasp(layouts),
        )

    def persist(self) -> PersistRequest:
        """Return what all workers wish together: the ranges of each of them."""
        wishes = [piece.persist for _, piece in sorted(self.pieces.items())]
        return joined([wish for wish in wishes if wish is not None])

    def _covers(self, ranges: Iterable[Range]) -> bool:
        """Whether the pieces hold all bytes of these ranges of the image."""
        spans = sorted((piece.first, piece.end) for piece in self.pieces.values())
        for _, at, end in ranges:
            reached = at
            for begin, until in spans:
                reached = until if begin <= reached < until else reached
            if reached < end:
                return False
        return True

    def gasp(self, layouts: Layouts) -> PersistRequest | None:
        """Return what is to be written where nobody is left to ask; None: nobody has said so, or
        these pieces are not enough for it.

        Where no gasp was given, it is the wish of one keeper that wrote all of it.
        """
        known = [layouts.get(piece.layout) for _, piece in sorted(self.pieces.items())]
        given = [layout.gasp for layout in known if layout is not None and layout.gasp is not None]
        if given:
            return given[0] if self._covers(given[0].ranges) else None
        if all(piece.persist is not None for piece in self.pieces.values()):
            wish = self.persist()
            return wish if wish.parts == 1 else None
        return None


Given = tuple[HeldWords, list[int]]


def merged(held: Iterable[Given]) -> tuple[list[HeldWords], list[int]]:
    """Return snapshots, newest first, and all their descriptors; of each there is one.

    A node's own part and its copies of others' make one, which is the first's but for the pieces
    and the random streams.
    """
    found: dict[tuple[Key, str], Given] = {}
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
    """Return what workers have of their own, by local worker, as the content of one file."""
    return msgspec.msgpack.encode([each for _, each in sorted(streams.items())])


def joined(wishes: list[PersistRequest]) -> PersistRequest:
    """Return one wish with the ranges of all; ValueError where they contradict each other."""
    first = wishes[0]
    ranges: dict[Range, None] = {}
    for wish in wishes:
        if msgspec.structs.replace(wish, ranges=first.ranges) != first:
            raise ValueError("the workers of this node wish for different checkpoints")
        ranges |= dict.fromkeys(wish.ranges)
    names = [name for name, _, _ in ranges]
    if len(set(names)) != len(names):
        raise ValueError("the workers of this node put different ranges into one file")
    return msgspec.structs.replace(first, ranges=tuple(ranges))


def check_where(persist: PersistRequest) -> None:
    """Raise ValueError for a place that only the worker could find."""
    if "://" not in persist.where and not persist.where.startswith("/"):
        raise ValueError(f"{persist.where!r} is no absolute path: a keeper has a folder of its own")


def _files_of(layout: LayoutFiles | None) -> Mapping[str, bytes]:
    return layout.files if layout is not None else {}
