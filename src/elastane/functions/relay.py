"""The output of a child process, forwarded to `sys.stdout` and `sys.stderr`.

A child inherits a stream that is a file of this process. Other streams (a notebook's, a test's)
have no descriptor: the waiting thread reads a pipe and writes the text to them. If a stream fails,
only its output is lost: the pipe is still read, so that no writer blocks.
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
    """One stream of a child, forwarded to a text stream of this process."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_broken = target is None

    def stdio(self) -> int:
        """Return the child's stream: the descriptor of the target, or PIPE."""
        fd = _descriptor(self._target)
        if fd is None:
            return subprocess.PIPE
        self._target.flush()
        return fd

    def forward(self, fd: int) -> bool:
        """Write what has arrived; False if nothing is there now, or nothing more will come."""
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
    """Return the descriptor of a plain text file; None for any other stream."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    try:
        return raw.fileno() if isinstance(raw, io.FileIO) else None
    except ValueError:  # closed
        return None
