"""The time index of a log file: the file's size at known moments.

Plain output carries no times. The agent checks its workers' files anyway. For each check that finds
growth it appends a pair of (bytes, wall-clock nanoseconds), 16 bytes, to a file beside the log. So
a line's time is known to within one check, and logs can be merged by time. A missing or torn index
makes times coarser and loses no line.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from elastane.process.streams.bounds import INDEX_EPOCH_ENTRIES
from elastane.process.streams.files import INDEX_SUFFIX, open_append

_ENTRY = struct.Struct("<QQ")


class IndexWriter:
    """Appends entries for one log file; the rate falls as entries grow, so the size is bounded."""

    def __init__(self, log_path: Path, interval_s: float) -> None:
        self._path = log_path.with_name(log_path.name + INDEX_SUFFIX)
        self._interval_ns = int(interval_s * 1e9)
        self._fd = -1
        self._entries = 0
        self._noted_bytes = 0
        self._due_ns = 0

    def open(self) -> None:
        """Open the file; if that fails, there is no index, and nothing else is lost."""
        with contextlib.suppress(OSError):
            self._fd = open_append(self._path)

    def note(self, size_bytes: int, now_ns: int, *, final: bool = False) -> bool:
        """Append a new size, unless the last entry is too recent; return whether it was appended.

        Never raises: a full disk makes the index coarser.
        """
        too_soon = now_ns < self._due_ns and not final
        if self._fd < 0 or size_bytes == self._noted_bytes or too_soon:
            return False
        try:
            os.write(self._fd, _ENTRY.pack(size_bytes, now_ns))
        except OSError:
            return False
        self._entries += 1
        self._noted_bytes = size_bytes
        self._due_ns = now_ns + self._gap_ns()
        return True

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _gap_ns(self) -> int:
        """Return the least time between notes; half a look less, for looks are not punctual."""
        return (self._interval_ns << self._entries // INDEX_EPOCH_ENTRIES) - self._interval_ns // 2


class TimeIndex:
    """Maps an offset of a log file to the time at which its byte was written."""

    def __init__(self, entries: Iterable[tuple[int, int]], fallback_ns: int) -> None:
        self._sizes, self._times = array("Q"), array("Q")
        self._fallback_ns = fallback_ns
        for size_bytes, time_ns in entries:
            self._add(size_bytes, time_ns)

    @classmethod
    def load(cls, log_path: Path) -> TimeIndex:
        """Read the index of a log file; without one, all bytes have the file's time of change."""
        try:
            data = log_path.with_name(log_path.name + INDEX_SUFFIX).read_bytes()
        except OSError:
            data = b""
        whole = data[: len(data) - len(data) % _ENTRY.size]
        try:
            changed_ns = log_path.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        return cls(_ENTRY.iter_unpack(whole), changed_ns)

    def time_ns(self, offset: int) -> int:
        """Return the wall-clock time by which the byte at `offset` had been written."""
        place = bisect_right(self._sizes, offset)
        if place < len(self._times):
            return self._times[place]
        return max(self._fallback_ns, self._times[-1] if self._times else 0)

    def _add(self, size_bytes: int, time_ns: int) -> None:
        """Keep entries that grow in both values: the file may be truncated, the clock set back."""
        if self._sizes and size_bytes <= self._sizes[-1]:
            return
        self._sizes.append(size_bytes)
        self._times.append(max(time_ns, self._times[-1] if self._times else 0))
