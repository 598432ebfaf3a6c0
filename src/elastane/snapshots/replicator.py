"""Sends a snapshot to the snapshot server of another node: one at a time, in a low-priority thread.

Nothing waits for it. How it fails: the replica does not arrive, which is logged once for each
reason; the next replicated save tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError
from elastane.snapshots.background import lower_priority
from elastane.snapshots.messages import (
    TO_SENDER,
    Declined,
    PeerProof,
    Replica,
    ReplicaOffer,
    ReplicaStored,
    ReplicaTaken,
    ReplicationSettings,
    SnapshotDescription,
    encode,
)
from elastane.snapshots.rules.replicas import OutgoingReplicas
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source, close_all, viewed

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection
    from elastane.snapshots.messages import ToSender

_log = logging.getLogger("elastane.snapshots")


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

    `neighbours` returns the replication settings, None without replication. `ended` is called from
    its thread, with whether the replica has arrived.
    """

    def __init__(
        self,
        origin: str,
        neighbours: Callable[[], ReplicationSettings | None],
        ended: Callable[[Name, bool], None],
    ) -> None:
        self._origin, self._neighbours, self._ended = origin, neighbours, ended
        self._logged = ""
        self.table = OutgoingReplicas()

    @property
    def copied(self) -> tuple[str, ...]:
        """Return the nonces of the replicas at the peer, oldest first."""
        return tuple(name.nonce for name in self.table.there)

    def stop(self) -> None:
        """Stop keeping snapshots for replication: a save without replicas is whole."""
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
        about, sources = self._neighbours(), tuple[Source, ...]()
        self.table.set_safe(replica.safe)
        if about is None or not replica.door or not self.table.begin(name, held, replica.door):
            return
        try:
            made = make(name, replica)
            sources = made.sources
            work = threading.Thread(target=self._run, args=(made, about), daemon=True)
            work.start()
        except (OSError, RuntimeError) as error:
            close_all(source.slot for source in sources)
            self.table.ended(name, arrived=False)
            _log.warning("the snapshot of step %d is not replicated: %s", name.key.step, error)

    def _run(self, errand: ReplicaTransfer, about: ReplicationSettings) -> None:
        from elastane.snapshots.connection import dial, reason_of

        lower_priority()
        reason = ""
        try:
            line = dial(errand.replica.door, about, TO_SENDER)
            try:
                self._send(errand, line)
            finally:
                line.close()
        except (OSError, ElastaneError, ValueError) as error:
            reason = reason_of(error)
        except Exception as error:
            _log.exception("a snapshot was not replicated, because of a bug in the snapshot server")
            reason = repr(error)
        finally:
            close_all(source.slot for source in errand.sources)
        self._log_once(errand, reason)
        self._ended(errand.name, not reason)

    def _send(self, errand: ReplicaTransfer, line: PeerConnection[ToSender]) -> None:
        words = encode(errand.words)
        offer = ReplicaOffer(
            origin=self._origin,
            group=errand.replica.group,
            key=errand.name.key,
            nonce=errand.name.nonce,
            safe=self.table.safe,
            words_bytes=len(words),
            sizes=tuple(source.end - source.first for source in errand.sources),
        )
        line.send(offer)
        _expect(line.receive(), ReplicaTaken)
        digests = [line.send_bytes(memoryview(words))]
        for source in errand.sources:
            with viewed(source.slot, source.end - source.first) as view:
                digests.append(line.send_bytes(view))
        if errand.known is not None and list(errand.known) != digests[1:]:
            raise ConnectionError("the snapshot changed in memory after it was kept")
        line.send(PeerProof(tuple(digests)))
        _expect(line.receive(), ReplicaStored)

    def _log_once(self, errand: ReplicaTransfer, reason: str) -> None:
        if reason and reason != self._logged:
            text = (
                "no replica of the snapshot of step %d came to the snapshot server at %s: %s [%s]"
            )
            slug = "snapshot-replicas"
            _log.warning(text, errand.name.key.step, errand.replica.door, reason, slug)
        self._logged = reason


def _expect(answer: ToSender, kind: type[ReplicaTaken] | type[ReplicaStored]) -> None:
    if isinstance(answer, Declined):
        raise ConnectionError(f"it declined the replica: {answer.reason}")
    if not isinstance(answer, kind):
        raise ConnectionError(f"it answered {type(answer).__name__}")
