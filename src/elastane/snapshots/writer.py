"""The threads that write a store's snapshots to storage, and the results of the last writes.

Owns the record of failures, and the limit of the wait for other writers of a save. The slot table
allows one write at a time. How it fails: a failure is kept for workers that ask, and logged in one
line, once for each reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import KEEPER_FAILURES_MAX, KEEPER_HURRY_S
from elastane.snapshots import events
from elastane.snapshots.background import digests_of, lower_priority
from elastane.snapshots.events import SnapshotEvent
from elastane.snapshots.messages import SaveFailed
from elastane.snapshots.shared_memory import close_all
from elastane.snapshots.writing import CheckpointWriter, WriteFailure, WriteOrder, Written

_log = logging.getLogger("elastane.snapshots")
_INCOMPLETE = "checkpoint-incomplete"


@dataclass(frozen=True)
class WriterCallbacks:
    """Callbacks from the writing thread: a key is durable, a write has ended.

    `ended` gets the failure, if there was one. `news` is for the agent's event log.
    """

    durable: Callable[[Key], None]
    ended: Callable[[WriteOrder, WriteFailure | None], None]
    news: Callable[[SnapshotEvent], None]


class SnapshotWriter:
    """Writes the snapshots of one store."""

    def __init__(self, heard: WriterCallbacks) -> None:
        self.last = (0.0, 0)  # Seconds and bytes of the last durable write.
        self.stopping = threading.Event()
        self._heard = heard
        self._writer = CheckpointWriter()
        self._lock = threading.Lock()
        self._failures: deque[SaveFailed] = deque(maxlen=KEEPER_FAILURES_MAX)
        self._logged = ""

    @property
    def failures(self) -> tuple[SaveFailed, ...]:
        """Return the last failures, newest last."""
        with self._lock:
            return tuple(self._failures)

    def begin(self, order: WriteOrder, *, gasp: bool, known: tuple[str, ...] | None) -> None:
        """Write in a new thread; `known` is the digest. Raises RuntimeError without a free thread.

        Descriptors of `order` are closed when the write has ended.
        """
        work = threading.Thread(
            target=self._write, args=(order, gasp, known), name="snapshot-write", daemon=True
        )
        work.start()

    def fail(self, key: Key, failure: WriteFailure, where: str = "") -> None:
        """Record a failure, and log it if its reason differs from the last one."""
        with self._lock:
            self._failures.append(SaveFailed(key, failure.reason, failure.slug))
            is_new, self._logged = failure.reason != self._logged, failure.reason
        if is_new:  # A full disk fails every save.
            line = "the snapshot of step %d is not written to storage: %s [%s]"
            _log.error(line, key.step, failure.reason, failure.slug)
            self._heard.news(events.PersistFailed(key, where, failure.reason[:4096], failure.slug))

    def _write(self, order: WriteOrder, gasp: bool, known: tuple[str, ...] | None) -> None:
        lower_priority()
        began_s = time.monotonic()
        failure = None
        try:
            if gasp and known is not None and digests_of(order.sources, lambda: True) != known:
                raise WriteFailure(
                    "it changed in memory after it was kept", slug="snapshot-changed"
                )
            written = self._writer.flush(order) if gasp else self._writer.write(order)
            self._heard.durable(order.name.key)
            self.last, self._logged = (time.monotonic() - began_s, written.size_bytes), ""
            self._report_saved(order, written)
            self._writer.prune(order.persist)
        except WriteFailure as error:
            failure = error
        except Exception as error:
            _log.exception("a snapshot was not written, because of a bug in the snapshot server")
            failure = WriteFailure(
                f"a bug in the snapshot server: {error!r}", slug="checkpoint-write"
            )
        finally:
            close_all(order.slots)
        if failure is not None:
            self.fail(order.name.key, failure, order.persist.where)
        self._heard.ended(order, failure)

    def _report_saved(self, order: WriteOrder, written: Written) -> None:
        """Report a checkpoint once: only the writer of its first part does."""
        if 0 in written.parts:
            (seconds, size_bytes), persist = self.last, order.persist
            saved = events.Saved(order.name.key, persist.where, persist.reason, size_bytes, seconds)
            self._heard.news(saved)


def lacks_other_parts(failure: WriteFailure | None) -> bool:
    """Whether a write failed only because other nodes' parts are missing."""
    return failure is not None and failure.slug == _INCOMPLETE


class PeerWait:
    """Bounds the wait for the other writers of a save once there is a reason to hurry."""

    def __init__(self, stopping: threading.Event, has_reason: Callable[[], bool]) -> None:
        self._stopping, self._has_reason = stopping, has_reason
        self._until_s = float("inf")

    def ended(self) -> bool:
        """Whether the wait is over; polled while the writer waits."""
        if not self._has_reason():
            self._until_s = float("inf")
        else:
            self._until_s = min(self._until_s, time.monotonic() + KEEPER_HURRY_S)
        return self._stopping.is_set() or time.monotonic() >= self._until_s
