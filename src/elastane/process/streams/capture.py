"""Captures streams of workers on their way to the console: pipes, tails, copies, and one thread.

A `Capture` owns one stream's pipe and its tail in memory, and fills the stream's copy, a
`KeptFile`. A slow console slows the worker exactly as if the worker wrote to the console itself; no
byte is lost, changed or reordered. A file in memory would not do: a program that opens /dev/stderr
again would truncate it and overwrite what others appended. If the console is a terminal, the pipe
is a raw pseudoterminal, so that progress bars and colours stay. Lines whose ends come soon are
written whole, so that those of two workers do not mix. If the tail can no longer be written (a
limit on file sizes), there is no tail.

The copy has a thread of its own, so a slow disk or a hung folder delays neither the worker nor the
console. Output beyond the queue is missing in the copy, and a line there says how much. At
`KEPT_BYTES_MAX` the file is renamed to `NAME.1.log`, which replaces an earlier one, and a new one
begins: the end of the output is always there.

The `Pump` is the one thread over all captures of a group, and calls everything of them but `open`.
It owns the order of turns. A stream whose console is full is not read, so its worker waits as it
would for the console itself; other streams continue. When a worker has ended, the rest of its
output is read from the kernel before its last lines are reported. At the end everything is
displayed, unless the console accepts nothing for `CAPTURE_STALL_S`; the loss is then reported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import termios
import threading
import time
import tty
from collections.abc import Callable
from pathlib import Path

from elastane.process.kernel import punch_hole
from elastane.process.streams.bounds import (
    CAPTURE_PARTIAL_S,
    CAPTURE_PAUSE_S,
    CAPTURE_READ_BYTES,
    CAPTURE_STALL_S,
    CAPTURE_TAIL_BYTES,
    FINISH_S,
    INDEX_POLL_S,
    KEPT_BYTES_MAX,
    KEPT_CLOSE_S,
    KEPT_QUEUE_BYTES,
    LINE_BYTES_MAX,
    PIPE_BYTES,
    SETTLE_BYTES_MAX,
    SETTLE_S,
)
from elastane.process.streams.console import BackgroundWriter, Console, ConsoleTimeout
from elastane.process.streams.files import INDEX_SUFFIX, IndexWriter, open_append

_F_SETPIPE_SZ = 1031


class Capture:
    """Copies one stream to `console` and to `kept`, if given, and keeps the stream's tail."""

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


def earlier(path: Path) -> Path:
    """Return the path of the previous part of a file, which was full."""
    return path.with_suffix(f".1{path.suffix}")


class KeptFile:
    """A copy of a stream; `failed` is called once with the cause if the copy ends early."""

    def __init__(self, path: Path, failed: Callable[[Path, OSError], None]) -> None:
        self.path = path
        self._failed = failed
        self._fd = -1
        self._size_bytes = 0
        self._index = IndexWriter(path, INDEX_POLL_S)
        self._writer = BackgroundWriter(self._write, KEPT_QUEUE_BYTES, f"kept-{path.stem}")

    def open(self) -> None:
        """Open the file for appending; raises OSError."""
        self._fd = open_append(self.path)
        self._size_bytes = os.fstat(self._fd).st_size
        self._index.open()

    def put(self, data: bytes) -> None:
        """Queue `data` to be written; never waits."""
        self._writer.put(data)

    def close(self, timeout_s: float) -> None:
        """Write the queue and close the file; after `timeout_s` its thread is left with it."""
        if self._writer.close(timeout_s):
            self._index.note(self._size_bytes, time.time_ns(), final=True)
            self._end()

    def _write(self, data: bytes, dropped: int) -> None:
        if self._fd < 0:
            return
        if dropped:
            data = b"[elastane: %d pieces of output are missing here]\n" % dropped + data
        try:
            if self._size_bytes + len(data) > KEPT_BYTES_MAX and self._size_bytes:
                self._begin_another()
            left = data
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._end()
            self._failed(self.path, error)
            return
        self._size_bytes += len(data)
        self._index.note(self._size_bytes, time.time_ns())

    def _begin_another(self) -> None:
        self._end()
        full = earlier(self.path)
        self.path.replace(full)
        with contextlib.suppress(OSError):  # without the renamed index, times are coarser
            index = self.path.with_name(self.path.name + INDEX_SUFFIX)
            index.replace(full.with_name(full.name + INDEX_SUFFIX))
        self._index = IndexWriter(self.path, INDEX_POLL_S)
        self.open()

    def _end(self) -> None:
        self._index.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Pump:
    """The thread over all captures of a group; it starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._captures: list[Capture] = []
        self._drains: list[tuple[Capture, threading.Event]] = []
        self._wake_fd = -1
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether there is output to wait for."""
        return self._thread is not None

    def add(self, capture: Capture) -> None:
        """Copy one more open stream."""
        with self._lock:
            self._captures.append(capture)
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._wake()

    def drain(self, capture: Capture) -> bool:
        """Wait until the tail holds all output so far and, within `SETTLE_S`, the console has it.

        The agent calls this before it reports on the output.
        """
        if not self.is_running:
            return True
        done = threading.Event()
        with self._lock:
            self._drains.append((capture, done))
        self._wake()
        return done.wait(SETTLE_S)

    def stop(self, on_done: Callable[[], None]) -> None:
        """Display the rest, close everything, call `on_done` in the thread."""
        self._on_done = on_done
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, unless it has ended: another file may have the descriptor's number."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            now_s = time.monotonic()
            taken_bytes = sum(self._copy(capture, now_s) for capture in self._open())
            self._drain_all(now_s)
            if taken_bytes < CAPTURE_READ_BYTES:
                time.sleep(
                    CAPTURE_PAUSE_S
                )  # So that a trickle of lines does not wake this thread for each line.
        self._finish()
        self._on_done()

    @staticmethod
    def _copy(capture: Capture, now_s: float) -> int:
        taken_bytes = capture.copy(now_s)
        capture.flush(now_s)
        return taken_bytes

    def _open(self) -> list[Capture]:
        with self._lock:
            return [c for c in self._captures if c.is_open or c.unsent_bytes]

    def _wait(self) -> None:
        """Wait until a readable stream has output, or a timeout passes."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        timeout_s: float | None = None
        for capture in self._open():
            if not capture.has_room and capture.console is not None:
                # The other streams of this console wait too; nothing else is as urgent.
                capture.console.wait_spare(CAPTURE_PAUSE_S)
                timeout_s = 0.0
            elif capture.is_open:
                poller.register(capture.fd, select.POLLIN)
            if capture.unsent_bytes and timeout_s is None:
                timeout_s = CAPTURE_PARTIAL_S
        ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _drain_all(self, now_s: float) -> None:
        with self._lock:
            drains, self._drains = self._drains, []
        for capture, done in drains:
            capture.copy(now_s, drain=True)
            capture.flush(now_s, final=True)
            if capture.unsent_bytes and not self._stopping:
                with self._lock:
                    self._drains.append((capture, done))
            else:
                done.set()

    def _finish(self) -> None:
        """Display the rest while the consoles accept it."""
        consoles = {c.console for c in self._captures if c.console is not None}
        timeout = ConsoleTimeout(FINISH_S, CAPTURE_STALL_S)
        while True:
            now_s = time.monotonic()
            for capture in self._captures:
                # Only processes whose output does not matter hold these streams: read what is
                # there.
                capture.copy(now_s)
                capture.flush(now_s, final=True)
            self._drain_all(now_s)
            behind = any(c.unsent_bytes or not c.has_room for c in self._captures)
            behind = behind or not all(console.wait_empty(0) for console in consoles)
            if not behind or not timeout.lasts(sum(c.written_bytes for c in consoles)):
                break
            time.sleep(CAPTURE_PAUSE_S)
        for capture in self._captures:
            lost_bytes = capture.close()
            if lost_bytes and capture.console is not None:
                capture.console.put(b"[elastane: %d bytes of output were lost here]\n" % lost_bytes)
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
