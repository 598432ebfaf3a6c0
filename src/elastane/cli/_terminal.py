"""A terminal that shows frames in its alternate screen, and is restored afterwards.

This module owns the escape sequences and the mode of the terminal. A frame is one write of the rows
that changed, so that it is fast on a slow connection. Closing always restores the terminal, unless
the terminal no longer exists.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Sequence
from typing import Any, Self

_OPEN = "\x1b[?1049h\x1b[?25l"
_CLOSE = "\x1b[?25h\x1b[?1049l"
_CLEAR = "\x1b[2J"
_ROW = "\x1b[{};1H\x1b[2K{}"
# The size that is assumed if a terminal does not tell its own.
_COLUMNS, _ROWS = 80, 24
_KEYS_BYTES = 256


def is_capable(environ_term: str) -> bool:
    """Return whether stdout is a terminal that can show frames."""
    return sys.stdout.isatty() and environ_term not in ("", "dumb")


class Terminal:
    """The terminal of stdout while frames are shown; keys come from stdin, if it is a terminal."""

    def __init__(self) -> None:
        self._output = sys.stdout.fileno()
        self._input = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._mode: list[Any] | None = None
        self._shown: list[str] = []
        self._size = (0, 0)

    def open(self) -> None:
        """Begin to show frames: keys are no longer echoed, the cursor is hidden."""
        if self._input is not None:
            self._mode = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        self._shown, self._size = [], (0, 0)
        self._write(_OPEN)

    def close(self) -> None:
        """Restore the terminal."""
        with contextlib.suppress(OSError, termios.error):
            if self._input is not None and self._mode is not None:
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._mode)
            self._write(_CLOSE)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def keys(self) -> int | None:
        """The descriptor that keys come from."""
        return self._input

    def pressed(self) -> bytes:
        """Return the keys that were pressed; b"" if the terminal no longer exists."""
        assert self._input is not None
        try:
            return os.read(self._input, _KEYS_BYTES)
        except OSError:
            return b""

    def size(self) -> tuple[int, int]:
        """Return columns and rows now."""
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._output)
            if size.columns and size.lines:
                return size.columns, size.lines
        return _COLUMNS, _ROWS

    def show(self, rows: Sequence[str], size: tuple[int, int]) -> None:
        """Show a frame that was made for `size`."""
        wanted = [*rows, *[""] * (size[1] - len(rows))][: size[1]]
        is_new = size != self._size
        old = [None] * len(wanted) if is_new else self._shown
        changed = [
            _ROW.format(number, row)
            for number, (row, before) in enumerate(zip(wanted, old, strict=True), 1)
            if row != before
        ]
        self._write((_CLEAR if is_new else "") + "".join(changed))
        self._shown, self._size = wanted, size

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "ascii", "replace")
        while data:
            data = data[os.write(self._output, data) :]
