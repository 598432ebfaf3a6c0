"""Copies the lines of one log file that contain one of several texts to a file of all ranks.

It reads the log file itself, so that a slow console makes it miss no line. It owns one position and
one line without its end; a line is written whole, with the worker's console prefix. A file that can
no longer be read or written is given up, with one warning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from elastane.process.streams.bounds import READ_BYTES_MAX, TEE_POLL_S
from elastane.process.streams.console import Console
from elastane.process.streams.files import open_append
from elastane.process.streams.lines import LineCutter

_log = logging.getLogger("elastane.streams")


class Filtered:
    """Copies the lines of `source` that contain any of `needles` to `target`."""

    console: Console | None = None
    lag_bytes = 0
    poll_s = TEE_POLL_S

    def __init__(self, source: Path, target: Path, needles: Sequence[str], prefix: bytes) -> None:
        self._source = source
        self._target = target
        self._needles = tuple(needle.encode("utf-8", "surrogateescape") for needle in needles)
        self._prefix = prefix
        self._cutter = LineCutter(b"")
        self._read_fd = self._write_fd = -1
        self._seen_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the file is still being read."""
        return self._read_fd >= 0

    def open(self) -> None:
        """Start at the file's present end, because earlier output belongs to an earlier run."""
        self._write_fd = open_append(self._target)
        try:
            self._read_fd = os.open(self._source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise
        self._seen_bytes = os.fstat(self._read_fd).st_size

    def look(self, *, final: bool = False) -> None:
        """Copy the matching lines of the new output."""
        try:
            if os.fstat(self._read_fd).st_size < self._seen_bytes:  # the file was truncated
                self._seen_bytes = 0
            while data := os.pread(self._read_fd, READ_BYTES_MAX, self._seen_bytes):
                self._seen_bytes += len(data)
                self._copy(self._cutter.feed(data, time.monotonic()))
            if final:
                self._copy(self._cutter.flush(time.monotonic(), final=True))
        except OSError as error:
            _log.warning("%s gets no more lines: %s", self._target, error.strerror or error)
            self.close()

    def skip_rest(self) -> None:
        """Do nothing: the last check has read everything."""

    def close(self) -> None:
        """Close what is open."""
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self._write_fd = -1

    def _copy(self, lines: bytes) -> None:
        found = [
            self._prefix + line
            for line in lines.splitlines(keepends=True)
            if any(needle in line for needle in self._needles)
        ]
        data = b"".join(found)
        while data:
            data = data[os.write(self._write_fd, data) :]
