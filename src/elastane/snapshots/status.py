"""How a shelf's writing and copying stand, for workers that want to know it before each save."""

from __future__ import annotations

from elastane.snapshots.messages import Stands, WriteProgress, encode
from elastane.snapshots.replicator import Courier
from elastane.snapshots.rules.snapshots import Snapshots
from elastane.snapshots.status_page import OwnPage
from elastane.snapshots.writer import Scribe


class ServerStatus:
    """One shelf's, under whose lock it is asked; `page` says what `Stands` would."""

    def __init__(self, books: Snapshots, scribe: Scribe, courier: Courier) -> None:
        self._books, self._scribe, self._courier = books, scribe, courier
        self.page = OwnPage()
        self._last: WriteProgress | None = None
        self.look()

    def now(self) -> WriteProgress:
        """Return how it stands."""
        return WriteProgress(
            writing=self._books.writing.key if self._books.writing else None,
            waiting=self._books.waiting.key if self._books.waiting else None,
            published=self._books.published,
            failures=self._scribe.failures,
            last_write_s=self._scribe.last[0],
            last_write_bytes=self._scribe.last[1],
            copying=self._courier.books.copying is not None,
            copied=self._courier.copied,
        )

    def look(self) -> None:
        """Turn the page if it has changed; called after whatever may change it."""
        now = self.now()
        if now != self._last:
            self._last = now
            self.page.turn(encode(Stands(now)))
