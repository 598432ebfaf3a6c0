"""The files of one worker: its folder, its logs with their time index, and its error file.

This module opens them so that output of an earlier attempt or run is never deleted, truncated or
taken for this worker's. It raises OSError; `group` decides what then becomes of the output.

Plain output carries no times, so each log has a time index: the file's size at known moments. The
agent checks its workers' files anyway. For each check that finds growth it appends a pair of
(bytes, wall-clock nanoseconds), 16 bytes, to a file beside the log. So a line's time is known to
within one check, and logs can be merged by time. A missing or torn index makes times coarser and
loses no line.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import msgspec

from elastane.process import environment
from elastane.process.streams.bounds import (
    ERROR_FILES_MAX,
    INDEX_EPOCH_ENTRIES,
    TAIL_BYTES_MAX,
    TAIL_LINES_MAX,
)
from elastane.process.streams.plan import WorkerPlace

WORKER_FILE = "worker.jsonl"
INDEX_SUFFIX = ".idx"
_CUT_MARK = "[... earlier output is in the file]\n"


def default_base_dir() -> str:
    """Return the default folder for logs: one for each user of this machine."""
    return str(Path(environment.get("TMPDIR") or "/tmp") / f"elastane-logs-{os.getuid()}")


def ensure_base_dir(base_dir: str) -> None:
    """Make the folder; require that the default one belongs to this user.

    Any user may create names in the folder for temporary files: a folder of another user, or a
    link, raises PermissionError.
    """
    is_default = base_dir == default_base_dir()
    Path(base_dir).mkdir(mode=0o700 if is_default else 0o777, parents=True, exist_ok=True)
    if not is_default:
        return
    found = Path(base_dir).lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{base_dir} belongs to another user")


def open_append(path: Path) -> int:
    """Open a file for appending; the descriptor is not inherited unless it is passed on.

    A symbolic link is an error, because other users of the folder could make it lead elsewhere.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def make_rank_dir(folder: Path, place: WorkerPlace, host: str) -> None:
    """Make a worker's folder and write a note of the worker's identity there.

    The note also proves that the disk accepts data: a full disk often still makes files, and the
    worker would fail at its first line of output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note_place(folder, place, host, time.time_ns())


def note_place(folder: Path, place: WorkerPlace, host: str, time_ns: int) -> None:
    """Append the rank that a worker has from a time on, its world, and what it had printed before.

    A worker that recovers in place has several, a replacement first a number of no world.
    """
    sizes = {f"{std}_bytes": _size_bytes(folder / f"{std}.log") for std in ("stdout", "stderr")}
    line = {
        "node": place.node,
        "host": host,
        "role": place.role,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "round": place.fence.round,
        "attempt": place.fence.attempt,
        "time_ns": time_ns,
        **sizes,
    }
    fd = open_append(folder / WORKER_FILE)
    try:
        os.write(fd, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(fd)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def fresh_error_file(folder: Path) -> str:
    """Return the name of an error file that no worker has written to yet.

    A job that runs again under its name has the same fence; the earlier worker's error must not be
    taken for this one's.
    """
    names = ["error.json", *(f"error.{n}.json" for n in range(1, ERROR_FILES_MAX))]
    return str(next((p for n in names if not (p := folder / n).exists()), folder / names[-1]))


def last_lines(
    path: str, *, lines_max: int = TAIL_LINES_MAX, bytes_max: int = TAIL_BYTES_MAX
) -> str:
    """Return the end of a file as text, bounded; "" if it cannot be read."""
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - bytes_max))
            data = file.read(bytes_max)
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").splitlines(keepends=True)
    cut = len(lines) > lines_max or size_bytes > bytes_max
    return (_CUT_MARK if cut else "") + "".join(lines[-lines_max:])


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
        """Return the least time between entries, less half a check: checks are not punctual."""
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

    @property
    def is_known(self) -> bool:
        """Whether it has entries; without them all bytes have one time."""
        return bool(self._times)

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
