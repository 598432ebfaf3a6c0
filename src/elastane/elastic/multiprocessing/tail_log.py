"""Shows log files as they grow, each line with a prefix that names its writer.

torch's module is not used: it splits a line that is being written, and without a filter shows none.

Owns one thread for all files of a TailLog. A file need not exist yet. A file that cannot be read,
or a destination that cannot be written, is logged, and the other files are still shown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import BinaryIO, TextIO

__all__ = ["TailLog", "tail_logfile"]
_log = logging.getLogger(__name__)
# The most characters of an unterminated line that are read at once.
_LINE_BYTES_MAX = 1 << 20


class _Tail:
    """One file, and how much of it was shown."""

    def __init__(
        self, header: str, file: str, dst: TextIO, keep: Callable[[str], bool] | None
    ) -> None:
        self._header, self._path, self._dst, self._keep = header, Path(file), dst, keep
        self._file: BinaryIO | None = None
        self._pending = b""

    def look(self, *, final: bool = False) -> None:
        """Show what was written since the last call; if `final`, an unterminated line too."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        while data := self._file.read(_LINE_BYTES_MAX):
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._show(line)
        if final and self._pending:
            self._show(self._pending)
        if final:
            self._file.close()

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace") + "\n"
        if self._keep is None or self._keep(text):
            self._dst.write(f"{self._header}{text}")


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Write each line of `file` to `dst` until `finished` is set and all is shown.

    Without a filter every line is shown (torch shows none).
    """
    tail = _Tail(header, file, dst, log_line_filter)
    while not finished.wait(interval_sec):
        tail.look()
    tail.look(final=True)


class TailLog:
    """Shows files by local rank; `start` returns at once, `stop` after the last line."""

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _: True,
    ) -> None:
        prefixes = log_line_prefixes or {}
        self._name = name
        self._interval_s = interval_sec
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), file, dst, log_line_filter)
            for rank, file in log_files.items()
        ]
        self._finished = Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> TailLog:
        """Start; returns itself."""
        if self._tails and self._thread is None:
            name = f"TailLog_{self._name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Show the remaining lines, and end. Idempotent."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has returned."""
        return self._stopped

    def _run(self) -> None:
        while not self._finished.wait(self._interval_s):
            self._look()
        self._look(final=True)

    def _look(self, *, final: bool = False) -> None:
        for tail in list(self._tails):
            try:
                tail.look(final=final)
            except (OSError, ValueError) as error:  # ValueError: the destination was closed
                _log.error("error in log tailer for %s: %s", self._name, error)
                self._tails.remove(tail)
