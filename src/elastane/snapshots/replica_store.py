"""Replicas that a snapshot server holds for another node: copies of its part of snapshots.

Owns their memory, at most that of two replicas, and their arrival. A replica is stored only if its
digests match those of the sender. Only this process can write to it; workers get read-only
descriptors. How it fails: a replica that does not arrive is not stored, and the sender gets a
reason.
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
from elastane.snapshots.messages import (
    WORDS,
    Declined,
    PeerProof,
    ReplicaOffer,
    ReplicaStored,
    ReplicaTaken,
    SnapshotDescription,
    ToReceiver,
)
from elastane.snapshots.rules.replicas import IncomingReplicas, ReplicaName
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import make_slot

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection

_log = logging.getLogger("elastane.snapshots")


@dataclass(frozen=True)
class ReplicaPiece:
    """The memory of one piece of a replica, and its size."""

    slot: int
    size_bytes: int


@dataclass
class _Held:
    words: SnapshotDescription
    pieces: list[ReplicaPiece]
    is_given: bool = False  # A worker may be reading it: its memory is not used again.


class ReplicaStore:
    """The replicas for one group of workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = IncomingReplicas()
        self._copies: dict[ReplicaName, _Held] = {}
        self._spare: list[ReplicaPiece] = []
        self._logged = ""

    def given(self, only: Name | None = None) -> list[tuple[SnapshotDescription, list[int]]]:
        """Return all replicas, or those of save `only`, each with new descriptors to read.

        The result is empty if this process has no free descriptors.
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
                        self._log_once(f"replicas of another node are not given out: {error}")
                        return []
                    opened.callback(os.close, descriptors[-1])
                found.append((held.words, descriptors))
            opened.pop_all()
            return found

    def clear(self) -> None:
        """Free all replicas, which no node needs any more."""
        with self._lock:
            self._table.clear()
            self._recycle()
            self._free_spare()

    def accept(self, offer: ReplicaOffer, line: PeerConnection[ToReceiver]) -> None:
        """Store an offered replica if it is wanted; raises OSError if it does not arrive."""
        copy = ReplicaName(offer.origin, Name(offer.key, offer.nonce))
        with self._lock:
            reason = self._table.offered(copy, offer.safe)
            self._recycle()
        if reason:
            line.send(Declined(reason))
            return
        pieces: list[ReplicaPiece] = []
        try:
            self._make_room(offer.sizes, pieces)
            self._receive(copy, offer, line, pieces)
        except BaseException as error:
            with self._lock:
                self._table.failed(copy)
                _close(pieces)
            if not isinstance(error, MemoryError):
                raise
            self._log_once(f"replicas of another node are not stored here: {error}")
            line.send(Declined(str(error)))
        else:
            self._logged = ""
            line.send(ReplicaStored())

    def _receive(
        self,
        copy: ReplicaName,
        offer: ReplicaOffer,
        line: PeerConnection[ToReceiver],
        pieces: list[ReplicaPiece],
    ) -> None:
        line.send(ReplicaTaken())
        packed = bytearray(offer.words_bytes)
        digests = [line.receive_into(memoryview(packed))]
        for piece in pieces:
            with _filled(piece) as view:
                digests.append(line.receive_into(view))
        words = _words(packed, offer, line.receive(), digests)
        with self._lock:
            if not self._table.arrived(copy):
                raise ConnectionError("another replica took its place")
            self._copies[copy] = _Held(words, pieces)

    def _make_room(self, sizes: Sequence[int], pieces: list[ReplicaPiece]) -> None:
        """Find memory for pieces of these sizes: that of removed replicas, else new."""
        with self._lock:
            spare = self._spare
            for size in sizes:
                fits = next((one for one in spare if one.size_bytes == size), None)
                if fits is not None:
                    spare.remove(fits)
                pieces.append(fits or ReplicaPiece(-1, size))
            self._free_spare()
        for number, piece in enumerate(pieces):
            if piece.slot < 0:
                try:
                    pieces[number] = ReplicaPiece(make_slot(piece.size_bytes), piece.size_bytes)
                except OSError as error:
                    raise MemoryError(error.strerror or str(error)) from error

    def _recycle(self) -> None:
        """Keep the memory of removed replicas for the next one; the caller holds the lock."""
        for copy in [*self._copies]:
            if copy not in self._table.held:
                held = self._copies.pop(copy)
                if held.is_given:
                    _close(held.pieces)
                else:
                    self._spare += held.pieces

    def _free_spare(self) -> None:
        """Free memory that fits no piece; the caller holds the lock."""
        _close(self._spare)
        self._spare = []

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            self._logged, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)


def _words(
    packed: bytearray, offer: ReplicaOffer, proof: ToReceiver, digests: Sequence[str]
) -> SnapshotDescription:
    if not isinstance(proof, PeerProof) or list(proof.digests) != list(digests):
        raise ConnectionError("a replica did not arrive as it was sent")
    try:
        words = WORDS.decode(packed)
    except UNREADABLE as error:
        raise ConnectionError(f"a replica without a readable description: {error}") from error
    sizes = [piece.end - piece.first for piece in words.pieces]
    if (words.key, words.nonce, sizes) != (offer.key, offer.nonce, list(offer.sizes)):
        raise ConnectionError("a replica of another snapshot than was offered")
    return words


@contextlib.contextmanager
def _filled(piece: ReplicaPiece) -> Iterator[memoryview]:
    """Map a piece for writing."""
    if not piece.size_bytes:
        yield memoryview(b"")
        return
    memory = mmap.mmap(piece.slot, piece.size_bytes)
    try:
        with memoryview(memory) as view:
            yield view
    finally:
        with contextlib.suppress(BufferError):  # A traceback may hold a view.
            memory.close()


def _to_read(slot: int) -> int:
    return os.open(f"/proc/self/fd/{slot}", os.O_RDONLY | os.O_CLOEXEC)


def _close(pieces: Sequence[ReplicaPiece]) -> None:
    for piece in pieces:
        if piece.slot >= 0:
            os.close(piece.slot)
