"""The output of a child process, brought to where `sys.stdout` and `sys.stderr` go.

A stream that is a file of this process is simply inherited. Others (a notebook's, a test's) have no
descriptor: there a pipe is read, by the thread that waits, and written on. A stream that fails
costs its output alone: what comes is still read, so that nobody blocks on a full pipe.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import subprocess
from typing import Any

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 10


class Relay:
    """One stream of a child, on its way to a text stream of this process."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_broken = target is None

    def stdio(self) -> int:
        """Return what the child is to get: the target's descriptor, or word that a pipe is due."""
        fd = _descriptor(self._target)
        if fd is None:
            return subprocess.PIPE
        self._target.flush()
        return fd

    def take(self, fd: int) -> bool:
        """Bring on what has come; False where nothing is there now, or nothing will come."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._write(self._decoder.decode(data, final=not data))
        return bool(data)

    def _write(self, text: str) -> None:
        if self._is_broken or not text:
            return
        try:
            self._target.write(text)
            self._target.flush()
        except (OSError, ValueError) as error:
            self._is_broken = True
            _log.warning("output of workers is not shown any more: %s", error)


def _descriptor(stream: Any) -> int | None:
    """Return the descriptor that a plain text file writes to; None for anything in its place."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    try:
        return raw.fileno() if isinstance(raw, io.FileIO) else None
    except ValueError:  # closed
        return None
