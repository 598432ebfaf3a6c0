"""The threads that write a shelf's snapshots to storage, and what came of the last ones.

Owns the memory of failures, and when other writers of a save are not waited for any longer. One
order at a time: the books see to that. How it fails: a failure is remembered for those who ask,
and said in one line of log, once for each reason.
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
from elastane.snapshots.background import digests_of, step_back
from elastane.snapshots.events import News
from elastane.snapshots.messages import SaveFailed
from elastane.snapshots.shared_memory import close_all
from elastane.snapshots.writing import WriteFailure, WriteOrder, Writer, Written

_log = logging.getLogger("elastane.snapshots")
_INCOMPLETE = "checkpoint-incomplete"


@dataclass(frozen=True)
class Heard:
    """Who is told, from the thread that writes: that a key is durable, and that it has ended.

    `ended` is given the failure, if there was one. `news` is for the agent's event log.
    """

    durable: Callable[[Key], None]
    ended: Callable[[WriteOrder, WriteFailure | None], None]
    news: Callable[[News], None]


class Scribe:
    """Writes for one shelf."""

    def __init__(self, heard: Heard) -> None:
        self.last = (0.0, 0)  # seconds and bytes of the last that became durable
        self.stopping = threading.Event()
        self._heard = heard
        self._writer = Writer()
        self._lock = threading.Lock()
        self._failures: deque[SaveFailed] = deque(maxlen=KEEPER_FAILURES_MAX)
        self._told = ""

    @property
    def failures(self) -> tuple[SaveFailed, ...]:
        """Return the last failures, the newest last."""
        with self._lock:
            return tuple(self._failures)

    def begin(self, order: WriteOrder, *, gasp: bool, known: tuple[str, ...] | None) -> None:
        """Write in a thread of its own; `known` is the digest. Raises RuntimeError if none is left.

        The descriptors of its sources are closed when it has ended.
        """
        work = threading.Thread(
            target=self._write, args=(order, gasp, known), name="keeper-write", daemon=True
        )
        work.start()

    def fail(self, key: Key, failure: WriteFailure, where: str = "") -> None:
        """Remember a failure, and say it, if it is another one than the last."""
        with self._lock:
            self._failures.append(SaveFailed(key, failure.reason, failure.slug))
            is_new, self._told = failure.reason != self._told, failure.reason
        if is_new:  # A full disk fails each save.
            line = "the snapshot of step %d is not written to storage: %s [%s]"
            _log.error(line, key.step, failure.reason, failure.slug)
            self._heard.news(events.PersistFailed(key, where, failure.reason[:4096], failure.slug))

    def _write(self, order: WriteOrder, gasp: bool, known: tuple[str, ...] | None) -> None:
        step_back()
        began_s = time.monotonic()
        failure = None
        try:
            if gasp and known is not None and digests_of(order.sources, lambda: True) != known:
                raise WriteFailure(
                    "it changed in memory after it was kept", slug="snapshot-changed"
                )
            written = self._writer.gasp(order) if gasp else self._writer.write(order)
            self._heard.durable(order.name.key)
            self.last, self._told = (time.monotonic() - began_s, written.size_bytes), ""
            self._tell_saved(order, written)
            self._writer.prune(order.persist)
        except WriteFailure as error:
            failure = error
        except Exception as error:
            _log.exception("a snapshot could not be written, for a fault of the keeper's own")
            failure = WriteFailure(
                f"a fault of the keeper's own: {error!r}", slug="checkpoint-write"
            )
        finally:
            close_all(order.slots)
        if failure is not None:
            self.fail(order.name.key, failure, order.persist.where)
        self._heard.ended(order, failure)

    def _tell_saved(self, order: WriteOrder, written: Written) -> None:
        """Tell of a checkpoint, once: by who wrote its first part."""
        if 0 in written.parts:
            (seconds, size_bytes), persist = self.last, order.persist
            saved = events.Saved(order.name.key, persist.where, persist.reason, size_bytes, seconds)
            self._heard.news(saved)


def is_others(failure: WriteFailure | None) -> bool:
    """Whether a writing failed for want of the others' parts alone."""
    return failure is not None and failure.slug == _INCOMPLETE


class WriteThrottle:
    """How long the other writers of one save are waited for, where there is reason to hurry."""

    def __init__(self, stopping: threading.Event, has_reason: Callable[[], bool]) -> None:
        self._stopping, self._has_reason = stopping, has_reason
        self._until_s = float("inf")

    def ended(self) -> bool:
        """Whether it is time to go on without them; asked again and again while one waits."""
        if not self._has_reason():
            self._until_s = float("inf")
        else:
            self._until_s = min(self._until_s, time.monotonic() + KEEPER_HURRY_S)
        return self._stopping.is_set() or time.monotonic() >= self._until_s
