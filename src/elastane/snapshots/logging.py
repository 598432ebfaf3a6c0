"""The log of a snapshot server, on the stderr that it inherited from its agent or worker.

A thread writes it, since the reader of that stderr may have stopped reading. Logging never blocks:
lines beyond a bound are dropped. `process.streams` does the same for an agent, but would double the
memory of a snapshot server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time

_STDERR = 2
_LINES_MAX = 256
_PAUSE_S = 0.01


class StderrHandler(logging.Handler):
    """Writes records as lines `elastane[keeper PID] text`."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(_LINES_MAX)
        self._thread = threading.Thread(target=self._write, name="snapshot-log", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            text = self.format(record).replace("\n", " | ")
        except (TypeError, ValueError):  # The format string does not fit its arguments.
            self.handleError(record)
            return
        line = f"elastane[keeper {os.getpid()}] {text}\n".encode(errors="replace")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def finish(self, timeout_s: float) -> None:
        """Wait until every line is written, for at most `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError):  # The reader is gone.
                os.write(_STDERR, line)
            self._lines.task_done()
