"""The agent's own stdout and stderr, each with its own writer thread and queue.

This module owns the order and the wholeness of lines on a console. `BackgroundWriter` is its
bounded queue with a thread, so that no caller waits for a terminal; the event log and copies of
output use it for disks. A target that is stuck, slow or gone blocks no caller: items beyond the
queue are dropped, and their count is written once the target accepts items again. The thread is a
daemon: a write that never returns does not block the process's exit.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from elastane.process.streams.bounds import CONSOLE_BYTES_MAX, RETRY_S, WRITE_BYTES

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


class Console(BackgroundWriter):
    """A descriptor for whole lines.

    `put` accepts one or more whole lines. `offer` accepts any bytes, but fewer, so that a flood
    drops no lines. The descriptor's flags are never changed, because the user's shell and the
    workers share it. It stays open after `close`.
    """

    def __init__(self, fd: int, *, bytes_max: int = CONSOLE_BYTES_MAX) -> None:
        super().__init__(self._write_lines, bytes_max, f"console-{fd}")
        self.fd = fd
        self.written_bytes = 0
        self._lost_writes = 0
        # The error of the last write that the descriptor rejected.
        self._rejected: OSError | None = None

    @property
    def loss(self) -> str:
        """Why the last output is lost; "" if it is not, or if nobody reads the descriptor."""
        if not self._lost_writes or self._rejected is None:
            return ""
        gone = self._rejected.errno in (errno.EPIPE, errno.EIO)  # a closed pipe, a terminal
        return "" if gone else str(self._rejected.strerror)

    def _write_lines(self, lines: bytes, dropped: int) -> None:
        lost = self._lost_writes + dropped
        if lost:
            lines = b"elastane: %d pieces of output were lost on this console\n" % lost + lines
        written = all(self._write_chunk(chunk) for chunk in _chunks(lines))
        self._lost_writes = 0 if written else lost + 1

    def _write_chunk(self, chunk: bytes) -> bool:
        """Write one chunk; False if the console rejects it (gone, or disk full)."""
        while chunk:
            try:
                written = os.write(self.fd, chunk)
                self.written_bytes += written
                chunk = chunk[written:]
            except BlockingIOError:
                # Another process made the shared descriptor non-blocking: wait for room.
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                poller.poll(RETRY_S * 1000)
            except OSError as error:
                self._rejected = error
                return False
        return True


def _chunks(lines: bytes) -> list[bytes]:
    """Cut at the ends of lines, so that other writers' output does not split a line."""
    if len(lines) <= WRITE_BYTES:
        return [lines]
    chunks, start = [], 0
    while start < len(lines):
        end = lines.rfind(b"\n", start, start + WRITE_BYTES) + 1
        if end <= start:
            end = lines.find(b"\n", start) + 1 or len(lines)
        chunks.append(lines[start:end])
        start = end
    return chunks


_consoles: dict[int, Console] = {}
_consoles_lock = threading.Lock()


def process_console(fd: int) -> Console:
    """Return this process's one console for stdout (1) or stderr (2).

    If both are the same terminal or pipe they share a console, so that lines never interleave.
    """
    with _consoles_lock:
        if fd not in _consoles:
            shared = next((c for c in _consoles.values() if _same_file(c.fd, fd)), None)
            _consoles[fd] = shared or Console(fd)
        return _consoles[fd]


def _same_file(one: int, other: int) -> bool:
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


class ConsoleTimeout:
    """A timeout for the last lines: `total_s` in all, `stall_s` without progress."""

    def __init__(self, total_s: float, stall_s: float) -> None:
        self._stall_s = stall_s
        self._end_s = time.monotonic() + total_s
        self._progress_s = time.monotonic()
        self._written_bytes = -1

    def lasts(self, written_bytes: int) -> bool:
        """Return whether to keep waiting, given the total of bytes written so far."""
        now_s = time.monotonic()
        if written_bytes != self._written_bytes:
            self._written_bytes, self._progress_s = written_bytes, now_s
        return now_s < min(self._end_s, self._progress_s + self._stall_s)
