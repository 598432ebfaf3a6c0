"""What a keeper tells its agent for the event log: what became durable, what did not, what is back.

Owns the messages and their pace: of checkpoints that follow each other closely the last is told,
with their number; a failure is told where its reason is another one than before. Nobody waits for
an agent that does not read: what finds no room is dropped.
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
    """A checkpoint is durable; `saves` are so many, of which this is the last. `reason`: why."""

    key: Key
    place: Where
    reason: Text
    size_bytes: int
    seconds: float
    saves: Count = 1


class PersistFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A snapshot was to become durable and did not; `place` is "" where none was said."""

    key: Key
    place: _Words
    reason: _Words
    slug: Text


class RestoredEvent(msgspec.Struct, frozen=True, tag="restored"):
    """The workers of this node go on from there: "memory", or a place. `why`, where it is known."""

    key: Key
    place: _Words
    why: _Words = ""


News = Saved | PersistFailed | RestoredEvent
NEWS: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


class Reporter:
    """Tells one agent, over its line; without one it tells nobody. From any thread."""

    def __init__(self, line: socket.socket | None) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._saved: Saved | None = None
        self._due_s = 0.0

    def tell(self, news: News) -> None:
        """Tell it now, or by `flush`."""
        if not isinstance(news, Saved):
            self._send(news)
            return
        with self._lock:
            before = self._saved.saves if self._saved is not None else 0
            self._saved = msgspec.structs.replace(news, saves=news.saves + before)
        self.flush()

    def flush(self, *, last: bool = False) -> None:
        """Tell what has waited long enough, or all."""
        now_s = time.monotonic()
        with self._lock:
            if self._saved is None or (now_s < self._due_s and not last):
                return
            news, self._saved = self._saved, None
            self._due_s = now_s + KEEPER_NEWS_S
        self._send(news)

    def left_s(self) -> float | None:
        """Return when `flush` is to be called; None: not yet known."""
        with self._lock:
            return max(0.0, self._due_s - time.monotonic()) if self._saved is not None else None

    def _send(self, news: News) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(encode(news), socket.MSG_DONTWAIT)
