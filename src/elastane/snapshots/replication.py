"""Replicas: copies of a node's part of a snapshot, sent to and held for other nodes.

`Replicator` sends one replica at a time, and nothing waits for it. If it does not arrive, that is
logged once for each reason, and the next replicated save tries again. `SnapshotListener` admits the
servers of other nodes: it bounds the connections that are not yet authenticated, and the replicas
that arrive at one time. A caller that cannot authenticate, or sends garbage, is disconnected and
logged once for each reason. `ReplicaStore` owns the memory of held replicas, at most two. It stores
one only if its digests match those of the sender. Only this process can write to it; workers get
read-only descriptors. All of it runs in threads of low priority. Why:
docs/decisions/snapshot-replicas.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError
from elastane.process.endpoint import Unproven, bound
from elastane.protocol.limits import UNPROVEN_TIMEOUT_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.digests import lower_priority
from elastane.snapshots.limits import PEERS_BACKLOG, PEERS_UNPROVEN_MAX, SENDERS_MAX
from elastane.snapshots.messages import (
    TO_RECEIVER,
    TO_SENDER,
    WORDS,
    Declined,
    PeerProof,
    Replica,
    ReplicaOffer,
    ReplicaStored,
    ReplicaTaken,
    ReplicationSettings,
    SnapshotDescription,
    ToReceiver,
    encode,
)
from elastane.snapshots.rules.replicas import IncomingReplicas, OutgoingReplicas, ReplicaName
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source, close_all, make_slot, viewed

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection
    from elastane.snapshots.messages import ToSender

_log = logging.getLogger("elastane.snapshots")


_PAUSE_S = 0.05


@dataclass(frozen=True)
class ReplicaTransfer:
    """A replica to send. `known` are the digests of `sources`, if they were computed.

    Its owner closes the descriptors of `sources` when the transfer has ended.
    """

    name: Name
    replica: Replica
    words: SnapshotDescription
    sources: tuple[Source, ...]
    known: tuple[str, ...] | None


class Replicator:
    """The replicator of one snapshot store, under whose lock it and its `table` are.

    `settings` returns the replication settings, None without replication. `ended` is called from
    its thread, with whether the replica has arrived.
    """

    def __init__(
        self,
        origin: str,
        settings: Callable[[], ReplicationSettings | None],
        ended: Callable[[Name, bool], None],
    ) -> None:
        self._origin = origin
        self._settings = settings
        self._ended = ended
        self._logged = ""
        self.table = OutgoingReplicas()

    @property
    def copied(self) -> tuple[str, ...]:
        """Return the nonces of the replicas at the peer, oldest first."""
        return tuple(name.nonce for name in self.table.there)

    def stop(self) -> None:
        """Keep no snapshot for replication: the workers ask for no replicas any more."""
        self.table.stop()

    def begin(
        self,
        name: Name,
        replica: Replica,
        held: Collection[Name],
        make: Callable[[Name, Replica], ReplicaTransfer],
    ) -> None:
        """Send a replica of a whole snapshot, in a thread; `make` prepares the transfer.

        It sends nothing if the request names no peer.
        """
        settings, sources = self._settings(), tuple[Source, ...]()
        self.table.set_safe(replica.safe)
        if (
            settings is None
            or not replica.replica_address
            or not self.table.begin(name, held, replica.replica_address)
        ):
            return
        try:
            made = make(name, replica)
            sources = made.sources
            work = threading.Thread(target=self._run, args=(made, settings), daemon=True)
            work.start()
        except (OSError, RuntimeError) as error:
            close_all(source.slot for source in sources)
            self.table.ended(name, arrived=False)
            _log.warning("the snapshot of step %d is not replicated: %s", name.key.step, error)

    def _run(self, transfer: ReplicaTransfer, settings: ReplicationSettings) -> None:
        from elastane.snapshots.connection import dial, reason_of

        lower_priority()
        reason = ""
        try:
            connection = dial(transfer.replica.replica_address, settings, TO_SENDER)
            try:
                self._send(transfer, connection)
            finally:
                connection.close()
        except (OSError, ElastaneError, ValueError) as error:
            reason = reason_of(error)
        except Exception as error:
            _log.exception("a snapshot was not replicated, because of a bug in the snapshot server")
            reason = repr(error)
        finally:
            close_all(source.slot for source in transfer.sources)
        self._log_once(transfer, reason)
        self._ended(transfer.name, not reason)

    def _send(self, transfer: ReplicaTransfer, connection: PeerConnection[ToSender]) -> None:
        words = encode(transfer.words)
        offer = ReplicaOffer(
            origin=self._origin,
            group=transfer.replica.group,
            key=transfer.name.key,
            nonce=transfer.name.nonce,
            safe=self.table.safe,
            words_bytes=len(words),
            sizes=tuple(source.end - source.first for source in transfer.sources),
        )
        connection.send(offer)
        _expect(connection.receive(), ReplicaTaken)
        digests = [connection.send_bytes(memoryview(words))]
        for source in transfer.sources:
            with viewed(source.slot, source.end - source.first) as view:
                digests.append(connection.send_bytes(view))
        if transfer.known is not None and list(transfer.known) != digests[1:]:
            raise ConnectionError("the snapshot changed in memory after it was kept")
        connection.send(PeerProof(tuple(digests)))
        _expect(connection.receive(), ReplicaStored)

    def _log_once(self, transfer: ReplicaTransfer, reason: str) -> None:
        if reason and reason != self._logged:
            text = (
                "the snapshot of step %d was not replicated to the snapshot server at %s: %s [%s]"
            )
            slug = "snapshot-replicas"
            _log.warning(
                text, transfer.name.key.step, transfer.replica.replica_address, reason, slug
            )
        self._logged = reason


def _expect(answer: ToSender, kind: type[ReplicaTaken] | type[ReplicaStored]) -> None:
    if isinstance(answer, Declined):
        raise ConnectionError(f"it declined the replica: {answer.reason}")
    if not isinstance(answer, kind):
        raise ConnectionError(f"it answered {type(answer).__name__}")


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

    def accept(self, offer: ReplicaOffer, connection: PeerConnection[ToReceiver]) -> None:
        """Store an offered replica if it is wanted; raises OSError if it does not arrive."""
        copy = ReplicaName(offer.origin, Name(offer.key, offer.nonce))
        with self._lock:
            reason = self._table.offered(copy, offer.safe)
            self._recycle()
        if reason:
            connection.send(Declined(reason))
            return
        pieces: list[ReplicaPiece] = []
        try:
            self._make_room(offer.sizes, pieces)
            self._receive(copy, offer, connection, pieces)
        except BaseException as error:
            with self._lock:
                self._table.failed(copy)
                _close(pieces)
            if not isinstance(error, MemoryError):
                raise
            self._log_once(f"replicas of another node are not stored here: {error}")
            connection.send(Declined(str(error)))
        else:
            self._logged = ""
            connection.send(ReplicaStored())

    def _receive(
        self,
        copy: ReplicaName,
        offer: ReplicaOffer,
        connection: PeerConnection[ToReceiver],
        pieces: list[ReplicaPiece],
    ) -> None:
        connection.send(ReplicaTaken())
        packed = bytearray(offer.words_bytes)
        digests = [connection.receive_into(memoryview(packed))]
        for piece in pieces:
            with viewed(piece.slot, piece.size_bytes, writable=True) as view:
                digests.append(connection.receive_into(view))
        words = _words(packed, offer, connection.receive(), digests)
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


def _to_read(slot: int) -> int:
    return os.open(f"/proc/self/fd/{slot}", os.O_RDONLY | os.O_CLOEXEC)


def _close(pieces: Sequence[ReplicaPiece]) -> None:
    for piece in pieces:
        if piece.slot >= 0:
            os.close(piece.slot)


class SnapshotListener:
    """Passes the offers of authenticated callers to `accept`."""

    def __init__(
        self,
        settings: ReplicationSettings,
        accept: Callable[[ReplicaOffer, PeerConnection[ToReceiver]], None],
    ) -> None:
        self.settings = settings
        self._offered = accept
        self._proven = threading.Semaphore(SENDERS_MAX)
        self._lock = threading.Lock()
        self._unproven = Unproven[socket.socket](PEERS_UNPROVEN_MAX, UNPROVEN_TIMEOUT_S)
        self._listener: socket.socket | None = None
        self._logged = ""

    def update(self, settings: ReplicationSettings) -> None:
        """Use other settings for later callers."""
        self.settings = settings

    def open(self) -> str:
        """Listen on this node's address; returns it as HOST:PORT. Raises OSError."""
        self._listener = bound(self.settings.host, 0)
        self._listener.listen(PEERS_BACKLOG)
        threading.Thread(target=self._accept, name="replica-listener", daemon=True).start()
        host = self.settings.host
        return f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        assert self._listener is not None, "open() comes first"
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:  # The caller is gone, or this process has no free descriptor for now.
                time.sleep(_PAUSE_S)
                continue
            self._make_room()
            try:
                # TLS takes the socket over; this duplicate can still shut it down.
                known = end.dup()
            except OSError:
                end.close()
                continue
            with self._lock:
                self._unproven.add(known, time.monotonic())
            caller = end, known, str(address[0])
            try:
                threading.Thread(target=self._serve, args=caller, daemon=True).start()
            except RuntimeError:
                end.close()
                self._forget(known)

    def _make_room(self) -> None:
        """Wait until one more unauthenticated caller fits; disconnect the oldest if necessary."""
        while True:
            with self._lock:
                wait_s = self._unproven.wait_s(time.monotonic())
                if not wait_s:
                    oldest = self._unproven.make_room()
                    if oldest is not None:
                        with contextlib.suppress(OSError):  # It is closed already.
                            oldest.shutdown(socket.SHUT_RDWR)
                        oldest.close()
                    return
            time.sleep(min(wait_s, _PAUSE_S))

    def _forget(self, known: socket.socket) -> None:
        with self._lock:
            if self._unproven.discard(known):
                known.close()

    def _serve(self, end: socket.socket, known: socket.socket, host: str) -> None:
        from elastane.snapshots.connection import answer, reason_of

        lower_priority()
        try:
            with contextlib.closing(answer(end, self.settings, TO_RECEIVER)) as connection:
                self._forget(known)
                self._receive(connection)
        except (OSError, ElastaneError, ValueError) as error:
            self._log_once(f"no replica of a snapshot came from {host}: {reason_of(error)}")
        except Exception:
            _log.exception("a replica was not accepted, because of a bug in the snapshot server")
        finally:
            end.close()
            self._forget(known)

    def _receive(self, connection: PeerConnection[ToReceiver]) -> None:
        """Accept the offer of an authenticated caller, unless too many replicas are arriving."""
        if not self._proven.acquire(blocking=False):
            raise ConnectionError(f"{SENDERS_MAX} other replicas are arriving")
        try:
            offer = connection.receive()
            if not isinstance(offer, ReplicaOffer):
                raise ConnectionError("it did not send an offer")
            self._offered(offer, connection)
        finally:
            self._proven.release()

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            self._logged, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)
