"""The agent's own stdout and stderr, each with its own writer thread.

This module owns the order and the wholeness of lines on a console. A console that is stuck, slow or
gone blocks no caller: output beyond its queue is dropped, and once the console accepts lines again,
it shows how many pieces were lost.
"""

from __future__ import annotations

import os
import select
import threading

from elastane.process.streams.bounds import CONSOLE_BYTES_MAX, RETRY_S, WRITE_BYTES
from elastane.process.streams.writer import BackgroundWriter


class Console:
    """A descriptor for whole lines.

    `put` accepts one or more whole lines. The descriptor's flags are never changed, because the
    user's shell and the workers share it.
    """

    def __init__(self, fd: int, *, bytes_max: int = CONSOLE_BYTES_MAX) -> None:
        self.fd = fd
        self.written_bytes = 0
        self._lost_writes = 0
        self._writer = BackgroundWriter(self._write, bytes_max, f"console-{fd}")

    @property
    def room_bytes(self) -> int:
        """Bytes that `put` accepts now without loss."""
        return self._writer.room_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes that can be offered now; less than can be put, so a flood drops nobody's lines."""
        return self._writer.spare_bytes

    def put(self, lines: bytes) -> bool:
        """Queue whole lines; False if they were dropped."""
        return self._writer.put(lines)

    def offer(self, data: bytes) -> bool:
        """Queue bytes, lines or not, if there is room; False where the caller has to keep them."""
        return self._writer.offer(data)

    def wait_spare(self, timeout_s: float) -> bool:
        """Wait until `offer` accepts bytes; False after `timeout_s`."""
        return self._writer.wait_spare(timeout_s)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until all lines are written; False after `timeout_s`."""
        return self._writer.wait_empty(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write the queue and end the thread; the descriptor stays open."""
        return self._writer.close(timeout_s)

    def _write(self, lines: bytes, dropped: int) -> None:
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
            except OSError:
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
