"""A bounded copy in a file of a worker's stream that goes to the console.

A thread of its own writes the file, so a slow disk or a hung folder delays neither the worker nor
the console. Output beyond the queue is missing in the copy, and a line there says how much. At
`KEPT_BYTES_MAX` the file is renamed to `NAME.1.log`, which replaces an earlier one, and a new one
begins: the end of the output is always there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from elastane.process.streams.bounds import INDEX_POLL_S, KEPT_BYTES_MAX, KEPT_QUEUE_BYTES
from elastane.process.streams.files import INDEX_SUFFIX, open_append
from elastane.process.streams.index import IndexWriter
from elastane.process.streams.writer import BackgroundWriter


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
