"""The status of a store's writes and replicas, which workers read before each save."""

from __future__ import annotations

from elastane.snapshots.messages import WriteProgress, WriteStatus, encode
from elastane.snapshots.replicator import Replicator
from elastane.snapshots.rules.snapshots import SlotTable
from elastane.snapshots.status_page import OwnStatusPage
from elastane.snapshots.writer import SnapshotWriter


class ServerStatus:
    """The status of one store, under whose lock it is used; `page` holds it as `WriteStatus`."""

    def __init__(self, table: SlotTable, writer: SnapshotWriter, replicator: Replicator) -> None:
        self._table, self._writer, self._replicator = table, writer, replicator
        self.page = OwnStatusPage()
        self._last: WriteProgress | None = None
        self.update()

    def now(self) -> WriteProgress:
        """Return the current status."""
        return WriteProgress(
            writing=self._table.writing.key if self._table.writing else None,
            waiting=self._table.waiting.key if self._table.waiting else None,
            published=self._table.published,
            failures=self._writer.failures,
            last_write_s=self._writer.last[0],
            last_write_bytes=self._writer.last[1],
            copying=self._replicator.table.copying is not None,
            copied=self._replicator.copied,
        )

    def update(self) -> None:
        """Update the page if the status has changed; called after anything that may change it."""
        now = self.now()
        if now != self._last:
            self._last = now
            self.page.write(encode(WriteStatus(now)))
