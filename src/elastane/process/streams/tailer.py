"""One thread that watches the files of a local worker group, for the console and the time index.

This module owns positions in files, never the files: workers write to them directly, so nothing
here can slow or lose output to a file. `LineCutter` cuts bytes into lines, `Tail` displays a file's
lines on the console, and `Filtered` copies matching lines to a file of all ranks, unaffected by the
console. A console that is slower than a worker gets the newest output, and a line with the size and
the place of the omitted part. A file that can no longer be read or written is given up, with one
line that says so.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastane.process.streams.bounds import (
    FINISH_S,
    INDEX_POLL_S,
    LAG_BYTES_MAX,
    LAG_KEEP_BYTES,
    LINE_BYTES_MAX,
    PARTIAL_WAIT_S,
    READ_BYTES_MAX,
    SHARE_BYTES_MIN,
    SKIP_TELL_S,
    STALL_S,
    TEE_POLL_S,
)
from elastane.process.streams.console import Console, ConsoleTimeout
from elastane.process.streams.files import IndexWriter, open_append

_log = logging.getLogger("elastane.streams")
LONG_LINE_MARK = b" [the line continues]"


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


# The pause that lets a console accept output while the last lines are displayed.
_FINAL_PAUSE_S = 0.005


class FollowedFile:
    """One log file that the thread checks, with the position up to which it was read.

    A subclass reads the new output in `look`.
    """

    console: Console | None = None
    poll_s = TEE_POLL_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._read_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the file is still being read."""
        return self._fd >= 0

    @property
    def lag_bytes(self) -> int:
        """Bytes that were written and not yet displayed on `console`."""
        return 0

    def open(self) -> None:
        """Start at the file's present end, because earlier output belongs to an earlier run."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._read_bytes = os.fstat(self._fd).st_size

    def look(self, *, final: bool = False) -> None:
        """Read new output; `final`: also a last line without its end."""
        raise NotImplementedError

    def skip_rest(self) -> None:
        """Give up the rest, and say so."""

    def close(self) -> None:
        """Close what is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Tail(FollowedFile):
    """One log file that is displayed on `console`, if there is one, and whose index is kept."""

    def __init__(self, path: Path, console: Console | None, prefix: bytes) -> None:
        super().__init__(path)
        self.console = console
        self.poll_s = TEE_POLL_S if console else INDEX_POLL_S
        self._prefix = prefix
        self._cutter = LineCutter(prefix)
        self._index = IndexWriter(path, self.poll_s)
        self._size_bytes = 0
        self._skipped_bytes = 0
        self._announced_s = 0.0

    @property
    def lag_bytes(self) -> int:
        """Bytes that were written and not yet displayed."""
        if self.console is None or not self.is_open:
            return 0
        return self._size_bytes - self._read_bytes + self._cutter.pending_bytes

    def open(self) -> None:
        """Start at the file's present end, because earlier output belongs to an earlier run."""
        super().open()
        self._size_bytes = self._read_bytes
        self._index.open()

    def look(self, *, final: bool = False) -> None:
        """Record growth in the index; display as much as the console has room for."""
        try:
            self._size_bytes = os.fstat(self._fd).st_size
            self._index.note(self._size_bytes, time.time_ns(), final=final)
            if self.console is not None:
                self._show(self.console, final=final)
        except OSError as error:
            self._announce(f"{self._path} can no longer be read here: {error.strerror}")
            self.close()

    def skip_rest(self) -> None:
        """Give up displaying the rest, and say so."""
        if self.lag_bytes:
            self._skip_to(self._size_bytes)
        self._announce_skipped(math.inf)

    def close(self) -> None:
        """Close what is open."""
        super().close()
        self._index.close()

    def _show(self, console: Console, *, final: bool) -> None:
        if self._size_bytes < self._read_bytes:  # the file was truncated
            self._read_bytes = 0
        if self._size_bytes - self._read_bytes > LAG_BYTES_MAX:
            self._skip_to(self._size_bytes - LAG_KEEP_BYTES)
        room_bytes = min(READ_BYTES_MAX, max(SHARE_BYTES_MIN, console.room_bytes))
        if not console.room_bytes:
            return
        now_s = time.monotonic()
        self._announce_skipped(now_s)
        wanted_bytes = min(room_bytes, self._size_bytes - self._read_bytes)
        data = os.pread(self._fd, wanted_bytes, self._read_bytes) if wanted_bytes else b""
        self._read_bytes += len(data)
        lines = self._cutter.feed(data, now_s) if data else b""
        at_end = final and self._read_bytes >= self._size_bytes
        lines += self._cutter.flush(now_s, final=at_end)
        if lines:
            console.put(lines)

    def _skip_to(self, offset: int) -> None:
        self._skipped_bytes += offset - self._read_bytes + self._cutter.drop()
        self._read_bytes = offset

    def _announce_skipped(self, now_s: float) -> None:
        if not self._skipped_bytes or now_s - self._announced_s < SKIP_TELL_S:
            return
        self._announce(f"{self._skipped_bytes} bytes were not shown here: they are in {self._path}")
        self._skipped_bytes, self._announced_s = 0, now_s

    def _announce(self, text: str) -> None:
        if self.console is not None:
            self.console.put(self._prefix + f"[elastane: {text}]\n".encode())


class Filtered(FollowedFile):
    """Copies the lines of `source` that contain any of `needles` to `target`.

    A line is written whole, under the worker's console prefix. A file that can no longer be read or
    written is given up, with one warning.
    """

    def __init__(self, source: Path, target: Path, needles: Sequence[str], prefix: bytes) -> None:
        super().__init__(source)
        self._target = target
        self._needles = tuple(needle.encode("utf-8", "surrogateescape") for needle in needles)
        self._prefix = prefix
        self._cutter = LineCutter(b"")
        self._write_fd = -1

    def open(self) -> None:
        """Start at the file's present end, because earlier output belongs to an earlier run."""
        self._write_fd = open_append(self._target)
        try:
            super().open()
        except OSError:
            self.close()
            raise

    def look(self, *, final: bool = False) -> None:
        """Copy the matching lines of the new output."""
        try:
            if os.fstat(self._fd).st_size < self._read_bytes:  # the file was truncated
                self._read_bytes = 0
            while data := os.pread(self._fd, READ_BYTES_MAX, self._read_bytes):
                self._read_bytes += len(data)
                self._copy(self._cutter.feed(data, time.monotonic()))
            if final:
                self._copy(self._cutter.flush(time.monotonic(), final=True))
        except OSError as error:
            _log.warning("%s gets no more lines: %s", self._target, error.strerror or error)
            self.close()

    def close(self) -> None:
        """Close what is open."""
        super().close()
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def _copy(self, lines: bytes) -> None:
        found = [
            self._prefix + line
            for line in lines.splitlines(keepends=True)
            if any(needle in line for needle in self._needles)
        ]
        data = b"".join(found)
        while data:
            data = data[os.write(self._write_fd, data) :]


class Tailer:
    """The thread over all `Tail`s of a group; it starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tails: list[FollowedFile] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether there is output to wait for."""
        return self._thread is not None

    def add(self, tail: FollowedFile) -> None:
        """Watch one more open tail."""
        self._tails.append(tail)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self, on_done: Callable[[], None]) -> None:
        """Display the rest, within a bound, close everything, call `on_done` in the thread."""
        self._on_done = on_done
        self._stopping.set()

    def _run(self) -> None:
        turn = 0
        while not self._stopping.wait(self._poll_s()):
            turn += 1
            self._look_at_all(turn)
        self._finish()
        self._on_done()

    def _poll_s(self) -> float:
        return min(tail.poll_s for tail in self._tails)

    def _look_at_all(self, turn: int, *, final: bool = False) -> None:
        """Check each file, each time with a different first one: they share the console's room."""
        tails = [tail for tail in self._tails if tail.is_open]
        first = turn % len(tails) if tails else 0
        for tail in tails[first:] + tails[:first]:
            tail.look(final=final)

    def _finish(self) -> None:
        """Display the rest while the consoles accept it."""
        consoles = {tail.console for tail in self._tails if tail.console}
        timeout = ConsoleTimeout(FINISH_S, STALL_S)
        self._look_at_all(0, final=True)
        while self._is_behind(consoles) and timeout.lasts(sum(c.written_bytes for c in consoles)):
            time.sleep(_FINAL_PAUSE_S)
            self._look_at_all(0, final=True)
        for tail in self._tails:
            tail.skip_rest()
            tail.close()

    def _is_behind(self, consoles: set[Console]) -> bool:
        lagging = any(tail.lag_bytes for tail in self._tails)
        return lagging or not all(console.wait_empty(0) for console in consoles)
