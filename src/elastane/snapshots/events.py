"""Events that a snapshot server sends to its agent: saved, failed and restored checkpoints.

Owns the messages and their rate. Saves in close succession are reported as one event, with the last
one and their number. A failure is reported if its reason differs from the one before. An agent that
does not read blocks nothing: events that find no room in its socket are dropped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Annotated

import msgspec

from elastane.protocol.checkpoints import Count, Key, Text
from elastane.protocol.limits import KEEPER_NEWS_S
from elastane.snapshots.messages import Where, encode

_Words = Annotated[str, msgspec.Meta(max_length=4096)]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is durable: the last of `saves`. `reason` says why it was saved."""

    key: Key
    place: Where
    reason: Text
    size_bytes: int
    seconds: float
    saves: Count = 1


class PersistFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A snapshot did not become durable. `place` is "" if no place was given."""

    key: Key
    place: _Words
    reason: _Words
    slug: Text


class RestoredEvent(msgspec.Struct, frozen=True, tag="restored"):
    """This node's workers were restored from `place`: "memory", or a path or URL."""

    key: Key
    place: _Words
    why: _Words = ""


SnapshotEvent = Saved | PersistFailed | RestoredEvent
SNAPSHOT_EVENTS: msgspec.msgpack.Decoder[SnapshotEvent] = msgspec.msgpack.Decoder(SnapshotEvent)


class EventReporter:
    """Sends events to one agent over its control socket; without one it drops them. Thread-safe."""

    def __init__(self, line: socket.socket | None) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._saved: Saved | None = None
        self._due_s = 0.0

    def report(self, news: SnapshotEvent) -> None:
        """Send an event now; a save may wait for `flush`."""
        if not isinstance(news, Saved):
            self._send(news)
            return
        with self._lock:
            before = self._saved.saves if self._saved is not None else 0
            self._saved = msgspec.structs.replace(news, saves=news.saves + before)
        self.flush()

    def flush(self, *, last: bool = False) -> None:
        """Send the waiting event if it is due; `last`: in any case."""
        now_s = time.monotonic()
        with self._lock:
            if self._saved is None or (now_s < self._due_s and not last):
                return
            news, self._saved = self._saved, None
            self._due_s = now_s + KEEPER_NEWS_S
        self._send(news)

    def left_s(self) -> float | None:
        """Return the seconds until `flush` is due, or None if nothing waits."""
        with self._lock:
            return max(0.0, self._due_s - time.monotonic()) if self._saved is not None else None

    def _send(self, news: SnapshotEvent) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(encode(news), socket.MSG_DONTWAIT)
