"""What a keeper says, on the stderr that it has from its agent or its worker.

A thread of its own writes it, since whoever reads that stderr may have stopped reading: nobody
waits for it, and lines that come when too many wait are dropped. `process.streams` does the same
for an agent, at a price in memory that is half of a keeper's.
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


class Saying(logging.Handler):
    """Writes records as lines `elastane[keeper PID] text`."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(_LINES_MAX)
        self._thread = threading.Thread(target=self._write, name="keeper-says", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            text = self.format(record).replace("\n", " | ")
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)
            return
        line = f"elastane[keeper {os.getpid()}] {text}\n".encode(errors="replace")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def finish(self, timeout_s: float) -> None:
        """Wait until all is written, so long at most."""
        until_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError):  # nobody hears it
                os.write(_STDERR, line)
            self._lines.task_done()
