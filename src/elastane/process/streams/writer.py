"""A bounded queue with one thread that writes it away, so that no caller ever waits for a disk
or a terminal.

It owns the queue and the thread, and knows nothing of what the bytes mean. Where the target
takes nothing, the queue fills up and further items are dropped and counted; the count is told
to the target with the next item that it accepts. The thread is a daemon: a write that never
returns holds up nobody's exit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

# Writes one item; may block; gets the number of items that were dropped before it.
WriteItem = Callable[[bytes, int], None]


class BackgroundWriter:
    """Write items in order, in a thread that starts with the first of them.

    `write` handles the target's errors itself: what it raises is a bug, and ends the thread.
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
        """Bytes that `offer` accepts now: half of the room is left to what comes by `put`."""
        return max(0, self._bytes_max // 2 - self._queued_bytes)

    def put(self, item: bytes) -> bool:
        """Queue an item, never wait; False where it was dropped for want of room.

        The item that crosses the bound is still taken: the bound is one of items waiting.
        """
        with self._changed:
            taken = self._take_in(item)
            self._dropped += not taken
        return taken

    def offer(self, item: bytes) -> bool:
        """Queue an item if there is room; else it stays the caller's, and nothing is lost."""
        with self._changed:
            return self.spare_bytes > 0 and self._take_in(item)

    def wait_spare(self, timeout_s: float) -> bool:
        """Wait until `offer` would take something; False where that took too long."""
        with self._changed:
            return self.spare_bytes > 0 or (self._changed.wait(timeout_s) and self.spare_bytes > 0)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all that was put is written; False where that took too long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._items or self._busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, then end the thread; False where something was left."""
        done = self.wait_empty(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if done and self._thread is not None:
            self._thread.join(timeout_s)
        return done

    def _take_in(self, item: bytes) -> bool:
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
        while (taken := self._take()) is not None:
            item, dropped = taken
            self._write(item, dropped)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take(self) -> tuple[bytes, int] | None:
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
