"""What a keeper holds for the keeper of another node: copies of its part of snapshots.

Owns their memory, of which there is as much as two copies take, and their way in. A copy is here
only when its digests are those of what was sent. Nobody but this process can write to it: workers
get descriptors to read. How it fails: what does not come is nothing, and the caller is told why.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.messages import HeldWords
from elastane.snapshots.peers import (
    WORDS,
    Declined,
    PeerProof,
    ReplicaOffer,
    ReplicaStored,
    ReplicaTaken,
    ToReceiver,
)
from elastane.snapshots.rules.replicas import Copy, Incoming
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.shared_memory import make_slot

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection

_log = logging.getLogger("elastane.snapshots")


@dataclass(frozen=True)
class ReplicaPiece:
    """One piece of a copy: its memory, and how much of it."""

    slot: int
    size_bytes: int


@dataclass
class _Held:
    words: HeldWords
    pieces: list[ReplicaPiece]
    is_given: bool = False  # somebody may be reading it: its memory is not used again


class Neighbour:
    """For one group of workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books = Incoming()
        self._copies: dict[Copy, _Held] = {}
        self._spare: list[ReplicaPiece] = []
        self._told = ""

    def given(self, only: Name | None = None) -> list[tuple[HeldWords, list[int]]]:
        """Return all that is held, or `only` of one save, with new descriptors to read it from.

        Nothing where this process has no descriptors left.
        """
        with self._lock, contextlib.ExitStack() as opened:
            found = []
            for copy, held in self._copies.items():
                if only not in (None, copy.name):
                    continue
                held.is_given = True
                descriptors = []
                for piece in held.pieces:
                    try:
                        descriptors.append(_to_read(piece.slot))
                    except OSError as error:
                        self._tell(f"what is held for a neighbour is not given out: {error}")
                        return []
                    opened.callback(os.close, descriptors[-1])
                found.append((held.words, descriptors))
            opened.pop_all()
            return found

    def over(self) -> None:
        """Let go of all: nobody needs it any more."""
        with self._lock:
            self._books.over()
            self._settle()
            self._let_go()

    def take(self, offer: ReplicaOffer, line: PeerConnection[ToReceiver]) -> None:
        """Take in a copy, if it is wanted; OSError where it does not come."""
        copy = Copy(offer.origin, Name(offer.key, offer.nonce))
        with self._lock:
            reason = self._books.offered(copy, offer.safe)
            self._settle()
        if reason:
            line.say(Declined(reason))
            return
        pieces: list[ReplicaPiece] = []
        try:
            self._make_room(offer.sizes, pieces)
            self._arrive(copy, offer, line, pieces)
        except BaseException as error:
            with self._lock:
                self._books.failed(copy)
                _close(pieces)
            if not isinstance(error, MemoryError):
                raise
            self._tell(f"copies for a neighbour are not kept here: {error}")
            line.say(Declined(str(error)))
        else:
            self._told = ""
            line.say(ReplicaStored())

    def _arrive(
        self,
        copy: Copy,
        offer: ReplicaOffer,
        line: PeerConnection[ToReceiver],
        pieces: list[ReplicaPiece],
    ) -> None:
        line.say(ReplicaTaken())
        packed = bytearray(offer.words_bytes)
        digests = [line.take_into(memoryview(packed))]
        for piece in pieces:
            with _filled(piece) as view:
                digests.append(line.take_into(view))
        words = _words(packed, offer, line.hear(), digests)
        with self._lock:
            if not self._books.arrived(copy):
                raise ConnectionError("another copy took its place")
            self._copies[copy] = _Held(words, pieces)

    def _make_room(self, sizes: Sequence[int], pieces: list[ReplicaPiece]) -> None:
        """Find memory for pieces of these sizes: that of copies that went, else new."""
        with self._lock:
            spare = self._spare
            for size in sizes:
                fits = next((one for one in spare if one.size_bytes == size), None)
                if fits is not None:
                    spare.remove(fits)
                pieces.append(fits or ReplicaPiece(-1, size))
            self._let_go()
        for number, piece in enumerate(pieces):
            if piece.slot < 0:
                try:
                    pieces[number] = ReplicaPiece(make_slot(piece.size_bytes), piece.size_bytes)
                except OSError as error:
                    raise MemoryError(error.strerror or str(error)) from error

    def _settle(self) -> None:
        """Take back the memory of what the books do not hold any more; the lock is held."""
        for copy in [*self._copies]:
            if copy not in self._books.held:
                held = self._copies.pop(copy)
                if held.is_given:
                    _close(held.pieces)
                else:
                    self._spare += held.pieces

    def _let_go(self) -> None:
        """Give back the memory that nothing fits; the lock is held."""
        _close(self._spare)
        self._spare = []

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)


def _words(
    packed: bytearray, offer: ReplicaOffer, proof: ToReceiver, digests: Sequence[str]
) -> HeldWords:
    if not isinstance(proof, PeerProof) or list(proof.digests) != list(digests):
        raise ConnectionError("a copy did not arrive as it was sent")
    try:
        words = WORDS.decode(packed)
    except UNREADABLE as error:
        raise ConnectionError(f"a copy without readable words: {error}") from error
    sizes = [piece.end - piece.first for piece in words.pieces]
    if (words.key, words.nonce, sizes) != (offer.key, offer.nonce, list(offer.sizes)):
        raise ConnectionError("a copy of another snapshot than was offered")
    return words


@contextlib.contextmanager
def _filled(piece: ReplicaPiece) -> Iterator[memoryview]:
    """Map a piece, to be filled."""
    if not piece.size_bytes:
        yield memoryview(b"")
        return
    memory = mmap.mmap(piece.slot, piece.size_bytes)
    try:
        with memoryview(memory) as view:
            yield view
    finally:
        with contextlib.suppress(BufferError):  # A trace may hold a part of it.
            memory.close()


def _to_read(slot: int) -> int:
    return os.open(f"/proc/self/fd/{slot}", os.O_RDONLY | os.O_CLOEXEC)


def _close(pieces: Sequence[ReplicaPiece]) -> None:
    for piece in pieces:
        if piece.slot >= 0:
            os.close(piece.slot)
