"""Cuts the bytes of a file into the lines that a console displays.

Pure: the times are arguments. This module handles lines without an end, lines that are too long,
and progress bars.
"""

from __future__ import annotations

from elastane.process.streams.bounds import LINE_BYTES_MAX, PARTIAL_WAIT_S

LONG_LINE_MARK = b" [the line goes on]"


class LineCutter:
    """Collects bytes and returns them as prefixed lines, each with its end."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._pending = b""
        self._pending_since_s = 0.0

    @property
    def pending_bytes(self) -> int:
        """Bytes of a line whose end has not come."""
        return len(self._pending)

    def feed(self, data: bytes, now_s: float) -> bytes:
        """Add bytes; return the complete lines."""
        if not self._pending:
            self._pending_since_s = now_s
        *whole, rest = (self._pending + data).split(b"\n")
        if whole:
            self._pending_since_s = now_s
        out = [self._shown(line) for line in whole]
        while len(rest) > LINE_BYTES_MAX:
            out.append(self._prefix + rest[:LINE_BYTES_MAX] + LONG_LINE_MARK + b"\n")
            rest = rest[LINE_BYTES_MAX:]
        self._pending = rest
        return b"".join(out)

    def flush(self, now_s: float, *, final: bool = False) -> bytes:
        """Return a line without its end, once it has waited for PARTIAL_WAIT_S."""
        waited_s = now_s - self._pending_since_s
        if not self._pending or (waited_s < PARTIAL_WAIT_S and not final):
            return b""
        line, self._pending = self._pending, b""
        return self._shown(line)

    def drop(self) -> int:
        """Drop a line without its end; return its size."""
        dropped, self._pending = len(self._pending), b""
        return dropped

    def _shown(self, line: bytes) -> bytes:
        """Return the line as a terminal would leave it: the last state of a progress bar."""
        if b"\r" in line:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
        if len(line) <= LINE_BYTES_MAX:
            return self._prefix + line + b"\n"
        pieces = [line[at : at + LINE_BYTES_MAX] for at in range(0, len(line), LINE_BYTES_MAX)]
        return (LONG_LINE_MARK + b"\n").join(self._prefix + piece for piece in pieces) + b"\n"
