"""A bounded queue with a writer thread, so that no caller waits for a disk or a terminal.

This module owns the queue and the thread, and does not interpret the bytes. If the target accepts
nothing, the queue fills up, and further items are dropped and counted; the next accepted item comes
with the count. The thread is a daemon: a write that never returns does not block the process's
exit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

# Writes one item and may block; also gets the number of items that were dropped before it.
WriteItem = Callable[[bytes, int], None]


class BackgroundWriter:
    """Writes items in order, in a thread that starts with the first of them.

    `write` must handle the target's errors: an exception is a bug, and ends the thread.
    """

    def __init__(self, write: WriteItem, bytes_max: int, name: str) -> None:
        self._write = write
        self._bytes_max = bytes_max
        self._name = name
        self._items: deque[bytes] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def room_bytes(self) -> int:
        """Bytes that `put` accepts now."""
        return max(0, self._bytes_max - self._queued_bytes)

    @property
    def spare_bytes(self) -> int:
        """Bytes that `offer` accepts now: half of the room is reserved for `put`."""
        return max(0, self._bytes_max // 2 - self._queued_bytes)

    def put(self, item: bytes) -> bool:
        """Queue an item without waiting; False if it was dropped for lack of room.

        The item that crosses the bound is accepted: the bound applies to the items that wait
        already.
        """
        with self._changed:
            accepted = self._enqueue(item)
            self._dropped += not accepted
        return accepted

    def offer(self, item: bytes) -> bool:
        """Queue an item if there is room; otherwise the caller keeps it, and nothing is lost."""
        with self._changed:
            return self.spare_bytes > 0 and self._enqueue(item)

    def wait_spare(self, timeout_s: float) -> bool:
        """Wait until `offer` accepts an item; False after `timeout_s`."""
        with self._changed:
            return self.spare_bytes > 0 or (self._changed.wait(timeout_s) and self.spare_bytes > 0)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every queued item is written; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._items or self._busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, timeout_s: float) -> bool:
        """Write the queue, then end the thread; False if items are left."""
        done = self.wait_empty(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if done and self._thread is not None:
            self._thread.join(timeout_s)
        return done

    def _enqueue(self, item: bytes) -> bool:
        if self._closed or self._queued_bytes >= self._bytes_max:
            return False
        self._items.append(item)
        self._queued_bytes += len(item)
        self._ensure_thread()
        self._changed.notify_all()
        return True

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            item, dropped = queued
            self._write(item, dropped)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[bytes, int] | None:
        """Wait for the next item; None once the writer is closed."""
        with self._changed:
            while not self._items:
                if self._closed:
                    return None
                self._changed.wait()
            item = self._items.popleft()
            self._queued_bytes -= len(item)
            self._busy = True
            dropped, self._dropped = self._dropped, 0
        return item, dropped
