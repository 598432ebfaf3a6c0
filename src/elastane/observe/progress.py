"""The progress of long transfers: a bar on a terminal, one line in a log.

Each read, write or transfer of a whole state is shown this way, on stderr, unless it ends within
`SHOWN_AFTER_S`. How it fails: a line that stderr does not accept is lost.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# A shorter transfer needs no bar.
SHOWN_AFTER_S = 2.0
# How often the size of a file that is being written is read.
_LOOK_S = 0.25


class ShownProgress:
    """The progress of one transfer of `total_bytes`; any thread may report it."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar: tuple[Progress, TaskID] | None = None
        self._is_told = False

    def add(self, count_bytes: int) -> None:
        """Add to the number of bytes that are done."""
        with self._lock:
            self._set(self._done_bytes + count_bytes)

    def reach(self, done_bytes: int) -> None:
        """Set the number of bytes that are done."""
        with self._lock:
            self._set(done_bytes)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].stop()

    def _set(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        took_s = time.monotonic() - self._begun_s
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=done_bytes)
        elif took_s >= SHOWN_AFTER_S and not self._is_told:
            self._is_told = True
            if sys.stderr.isatty():
                self._bar = _bar(self._what, self._total_bytes, done_bytes)
            else:
                self._print(took_s)

    def _print(self, took_s: float) -> None:
        done, total = self._done_bytes, self._total_bytes
        left = f", about {took_s * (total - done) / done:.0f} s left" if 0 < done <= total else ""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(
                f"elastane: {self._what}: {size_text(done)} of {size_text(total)}"
                f" in {took_s:.1f} s{left}\n"
            )


@contextlib.contextmanager
def shown_progress(what: str, total_bytes: int) -> Iterator[ShownProgress]:
    """Show the progress of `what`, such as "reading step 40", until the block ends."""
    shown = ShownProgress(what, total_bytes)
    try:
        yield shown
    finally:
        shown.close()


@contextlib.contextmanager
def writing_progress(what: str, total_bytes: int, path: Path) -> Iterator[None]:
    """Show the growth of a file whose writer reports nothing itself."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_S):
            with contextlib.suppress(OSError):
                shown.reach(path.stat().st_size)

    with shown_progress(what, total_bytes) as shown:
        following = threading.Thread(target=follow, name="elastane-progress", daemon=True)
        following.start()
        try:
            yield
        finally:
            ended.set()
            following.join()


def size_text(count: float) -> str:
    """Return bytes in a unit that fits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _bar(what: str, total_bytes: int, done_bytes: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bars.add_task(what, total=total_bytes, completed=done_bytes)
    bars.start()
    return bars, task
