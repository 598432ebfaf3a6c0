"""Captures one stream of a worker on its way to the console: a pipe, its tail, and a copy.

This module owns the pipe and the tail in memory, and fills the copy, a file (see `kept`). A slow
console slows the worker exactly as if the worker wrote to the console itself; no byte is lost,
changed or reordered. A file in memory would not do: a program that opens /dev/stderr again would
truncate it and overwrite what others appended. If the console is a terminal, the pipe is a raw
pseudoterminal, so that progress bars and colours stay. Lines whose ends come soon are written
whole, so that those of two workers do not mix.

Not safe for threads: `pump` calls everything but `open` from its thread. If the tail can no longer
be written (a limit on file sizes), there is no tail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import termios
import tty

from elastane.process.kernel import punch_hole
from elastane.process.streams.bounds import (
    CAPTURE_PARTIAL_S,
    CAPTURE_READ_BYTES,
    CAPTURE_TAIL_BYTES,
    KEPT_CLOSE_S,
    LINE_BYTES_MAX,
    PIPE_BYTES,
    SETTLE_BYTES_MAX,
)
from elastane.process.streams.console import Console
from elastane.process.streams.kept import KeptFile

_F_SETPIPE_SZ = 1031


class Capture:
    """Copies one stream to `console` and into `kept`, where there are such.

    In any case it remembers the stream's end.
    """

    def __init__(self, console: Console | None, kept: KeptFile | None = None) -> None:
        self.console = console
        self._kept = kept
        self.fd = -1
        self._tail = _CaptureTail()
        self._unsent = b""
        self._unsent_since_s = 0.0

    def open(self) -> int:
        """Return the descriptor that the worker writes to; the caller closes it."""
        if self.console is not None and os.isatty(self.console.fd):
            self.fd, write = _terminal_like(self.console.fd)
        else:
            self.fd, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        # this user's pipes hold the allowed total already, or it is no pipe
        with contextlib.suppress(OSError):
            fcntl.fcntl(write, _F_SETPIPE_SZ, PIPE_BYTES)
        self._tail.open()
        return write

    @property
    def tail_path(self) -> str:
        """The path, for this process only, at which the stream's tail can be read."""
        return self._tail.path

    @property
    def is_open(self) -> bool:
        """Whether more output may come."""
        return self.fd >= 0

    @property
    def has_room(self) -> bool:
        """Whether the console accepts more, so that a read is useful."""
        return self.console is None or (
            self.console.spare_bytes > 0 and len(self._unsent) <= LINE_BYTES_MAX
        )

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were read and not yet given to the console."""
        return len(self._unsent)

    def copy(self, now_s: float, *, drain: bool = False) -> int:
        """Read the available output and display it; return the number of bytes read.

        `drain`: read everything that the kernel holds, even if the console accepts nothing now.
        """
        taken_bytes = 0
        while self.is_open and (self.has_room or drain):
            try:
                data = os.read(self.fd, CAPTURE_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # EIO from a pseudoterminal: no process holds the other side.
            if not data:
                self._end()
                break
            taken_bytes += len(data)
            self._tail.write(data)
            if self._kept is not None:
                self._kept.put(data)
            if self.console is not None:
                if not self._unsent:
                    self._unsent_since_s = now_s
                self._unsent += data
                self._send_lines(now_s)
            drain = drain and taken_bytes < SETTLE_BYTES_MAX
            if taken_bytes >= PIPE_BYTES and not drain:
                break  # Let the other streams have their turn.
        return taken_bytes

    def flush(self, now_s: float, *, final: bool = False) -> None:
        """Display a line without its end once it has waited for CAPTURE_PARTIAL_S."""
        self._send_lines(now_s)
        late = now_s - self._unsent_since_s >= CAPTURE_PARTIAL_S
        if self._unsent and (late or final):
            self._send(len(self._unsent), now_s)

    def close(self) -> int:
        """Close everything that is open; return how many bytes were never displayed."""
        self._end()
        self._tail.close()
        if self._kept is not None:
            self._kept.close(KEPT_CLOSE_S)
        left, self._unsent = len(self._unsent), b""
        return left

    def _send_lines(self, now_s: float) -> None:
        # A progress bar ends its text with a carriage return.
        end = max(self._unsent.rfind(b"\n"), self._unsent.rfind(b"\r")) + 1
        if len(self._unsent) - end > LINE_BYTES_MAX:
            end = len(self._unsent)
        if end:
            self._send(end, now_s)

    def _send(self, end: int, now_s: float) -> None:
        if self.console is not None and self.console.offer(self._unsent[:end]):
            self._unsent, self._unsent_since_s = self._unsent[end:], now_s

    def _end(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _terminal_like(console_fd: int) -> tuple[int, int]:
    """Return both sides of a raw pseudoterminal of the console's size."""
    own, workers = os.openpty()
    tty.setraw(workers)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(console_fd, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(workers, termios.TIOCSWINSZ, size)
    return own, workers


class _CaptureTail:
    """The tail of a stream as a file in memory, whose beginning is freed."""

    def __init__(self) -> None:
        self._fd = -1
        self._size_bytes = 0
        self._punched_bytes = 0

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._fd}" if self._fd >= 0 else ""

    def open(self) -> None:
        self._fd = os.memfd_create("elastane-stderr", os.MFD_CLOEXEC)

    def write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            self._size_bytes += os.write(self._fd, data)
            if self._size_bytes - self._punched_bytes > 2 * CAPTURE_TAIL_BYTES:
                self._punched_bytes = self._size_bytes - CAPTURE_TAIL_BYTES
                punch_hole(self._fd, self._punched_bytes)
        except OSError:
            self.close()  # A limit on file sizes (ulimit -f) costs the diagnosis only.

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
