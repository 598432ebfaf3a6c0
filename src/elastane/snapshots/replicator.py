"""The way of a copy to another node's keeper: one at a time, in a thread that steps back.

Nothing waits for it. How it fails: the copy does not come, which is told once for each reason;
the next save that is copied tries anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError
from elastane.snapshots.background import step_back
from elastane.snapshots.messages import HeldWords, Replica, encode
from elastane.snapshots.peers import (
    TO_SENDER,
    Declined,
    Neighbours,
    PeerProof,
    ReplicaOffer,
    ReplicaStored,
    ReplicaTaken,
)
from elastane.snapshots.rules.replicas import Outgoing
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.shared_memory import close_all, viewed
from elastane.snapshots.writing import Source

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection
    from elastane.snapshots.peers import ToSender

_log = logging.getLogger("elastane.snapshots")


@dataclass(frozen=True)
class Errand:
    """A copy of what these sources hold; `known` are their digests, where they were taken.

    The descriptors of the sources are closed when it has ended.
    """

    name: Name
    replica: Replica
    words: HeldWords
    sources: tuple[Source, ...]
    known: tuple[str, ...] | None


class Courier:
    """One shelf's, under whose lock it and its books are; `neighbours` says how to reach others.

    `ended` is called from its thread: whether a copy has come.
    """

    def __init__(
        self,
        origin: str,
        neighbours: Callable[[], Neighbours | None],
        ended: Callable[[Name, bool], None],
    ) -> None:
        self._origin, self._neighbours, self._ended = origin, neighbours, ended
        self._told = ""
        self.books = Outgoing()

    @property
    def copied(self) -> tuple[str, ...]:
        """Return the nonces of what the peer has, oldest first."""
        return tuple(name.nonce for name in self.books.there)

    def over(self) -> None:
        """A snapshot is whole of which no copies are wanted."""
        self.books.over()

    def begin(
        self,
        name: Name,
        replica: Replica,
        held: Collection[Name],
        errand: Callable[[Name, Replica], Errand],
    ) -> None:
        """Bring a copy of a whole snapshot, in a thread of its own; `errand` makes its content.

        Not where the wish is not to copy this one.
        """
        about, sources = self._neighbours(), tuple[Source, ...]()
        self.books.hear(replica.safe)
        if about is None or not replica.door or not self.books.whole(name, held, replica.door):
            return
        try:
            made = errand(name, replica)
            sources = made.sources
            work = threading.Thread(target=self._bring, args=(made, about), daemon=True)
            work.start()
        except (OSError, RuntimeError) as error:
            close_all(source.slot for source in sources)
            self.books.ended(name, arrived=False)
            _log.warning("the snapshot of step %d is not copied: %s", name.key.step, error)

    def _bring(self, errand: Errand, about: Neighbours) -> None:
        from elastane.snapshots.connection import dial, told

        step_back()
        reason = ""
        try:
            line = dial(errand.replica.door, about, TO_SENDER)
            try:
                self._pass(errand, line)
            finally:
                line.close()
        except (OSError, ElastaneError, ValueError) as error:
            reason = told(error)
        except Exception as error:
            _log.exception("a snapshot could not be copied, for a fault of the keeper's own")
            reason = repr(error)
        finally:
            close_all(source.slot for source in errand.sources)
        self._tell(errand, reason)
        self._ended(errand.name, not reason)

    def _pass(self, errand: Errand, line: PeerConnection[ToSender]) -> None:
        words = encode(errand.words)
        offer = ReplicaOffer(
            origin=self._origin,
            group=errand.replica.group,
            key=errand.name.key,
            nonce=errand.name.nonce,
            safe=self.books.safe,
            words_bytes=len(words),
            sizes=tuple(source.end - source.first for source in errand.sources),
        )
        line.say(offer)
        _insist(line.hear(), ReplicaTaken)
        digests = [line.put(memoryview(words))]
        for source in errand.sources:
            with viewed(source.slot, source.end - source.first) as view:
                digests.append(line.put(view))
        if errand.known is not None and list(errand.known) != digests[1:]:
            raise ConnectionError("the snapshot changed in memory after it was kept")
        line.say(PeerProof(tuple(digests)))
        _insist(line.hear(), ReplicaStored)

    def _tell(self, errand: Errand, reason: str) -> None:
        if reason and reason != self._told:
            line = "no copy of the snapshot of step %d came to the keeper at %s: %s [%s]"
            slug = "snapshot-replicas"
            _log.warning(line, errand.name.key.step, errand.replica.door, reason, slug)
        self._told = reason


def _insist(said: ToSender, kind: type[ReplicaTaken] | type[ReplicaStored]) -> None:
    if isinstance(said, Declined):
        raise ConnectionError(f"it does not take it: {said.reason}")
    if not isinstance(said, kind):
        raise ConnectionError(f"it answered {type(said).__name__}")
