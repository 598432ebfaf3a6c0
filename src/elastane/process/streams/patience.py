"""The time that the end of a job waits for a console that is slow or stuck."""

from __future__ import annotations

import time


class ConsoleTimeout:
    """A timeout for the last lines: `total_s` in all, `stall_s` without progress."""

    def __init__(self, total_s: float, stall_s: float) -> None:
        self._stall_s = stall_s
        self._end_s = time.monotonic() + total_s
        self._progress_s = time.monotonic()
        self._written_bytes = -1

    def lasts(self, written_bytes: int) -> bool:
        """Return whether to keep waiting, given the total of bytes written so far."""
        now_s = time.monotonic()
        if written_bytes != self._written_bytes:
            self._written_bytes, self._progress_s = written_bytes, now_s
        return now_s < min(self._end_s, self._progress_s + self._stall_s)
