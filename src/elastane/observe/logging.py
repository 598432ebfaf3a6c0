"""The stderr log of agent and coordinator: one line for each note, and no repetitions.

This module owns the logger `elastane`, its level (LOGLEVEL, as torchrun reads it) and the choice of
kinds that a person must see. A stuck or closed stderr loses lines and blocks no caller: the
console's own thread writes them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from elastane.errors import UsageError
from elastane.observe.box import render_box
from elastane.process.streams.console import Console, process_console
from elastane.protocol.log_events import EventKind, Note

__all__ = [
    "ConsoleHandler",
    "flush",
    "level_of",
    "log_note",
    "note_level",
    "note_line",
    "one_line",
    "render_box",
    "setup",
]

DEFAULT_LEVEL = "WARNING"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LINE_CHARS_MAX = 1000
# A repetition within this time is counted instead of printed. An agent that looks for its
# coordinator would otherwise print a line several times a second.
REPEAT_S = 10.0
_REMEMBERED_MAX = 64
_STDERR = 2

# Events that a person must see at the default level: a failure, or a job that waits for a person.
_WARNINGS = frozenset(
    {
        EventKind.AUTHORITY_LOST,
        EventKind.COORDINATOR_AWAY,
        EventKind.EVENTS_LOST,
        EventKind.INCIDENT,
        EventKind.NODE_DEPARTED,
        EventKind.NODE_REFUSED,
        EventKind.REPLACEMENT,
        EventKind.RESTART,
        EventKind.SIGNAL,
        EventKind.STALL,
        EventKind.WAITING,
        EventKind.ZYGOTE_DIED,
        EventKind.ZYGOTE_PROBLEM,
    }
)


def level_of(text: str) -> int:
    """Return the level in LOGLEVEL, a name in letters of any case or a number."""
    name = text.strip().upper() or DEFAULT_LEVEL
    if name in LEVELS:
        return logging.getLevelNamesMapping()[name]
    if name.isdigit() and len(name) <= 3:
        return int(name)
    raise UsageError(
        f"LOGLEVEL = {text!r}",
        slug="log-level",
        expected=f"one of {', '.join(LEVELS)}, or a number",
        next_step="LOGLEVEL=INFO shows every event",
    )


def note_level(note: Note) -> int:
    """Return the log level of a note."""
    return logging.WARNING if note.kind in _WARNINGS else logging.INFO


def note_line(note: Note) -> str:
    """Return a note as `kind: reason`, with its fence unless the reason names a round."""
    where = f" ({note.fence})" if note.fence and "round" not in note.reason else ""
    return f"{note.kind}: {note.reason}{where}"


class ConsoleHandler(logging.Handler):
    """Writes records to a console as lines `elastane[node] text`, without control characters.

    A line repeated within `REPEAT_S` is counted, and the count is printed when the line comes again
    after that.
    """

    def __init__(self, console: Console, node: str) -> None:
        super().__init__()
        self.console = console
        self._node = node
        self._printed: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as one line."""
        try:
            text = one_line(record.getMessage())
            if record.exc_info:
                text += " | " + one_line(logging.Formatter().formatException(record.exc_info))
            self._print(text)
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)

    def _print(self, text: str) -> None:
        now_s = time.monotonic()
        printed_s, suppressed = self._printed.get(text, (-REPEAT_S, 0))
        if now_s - printed_s < REPEAT_S:
            self._printed[text] = (printed_s, suppressed + 1)
            return
        self._printed[text] = (now_s, 0)
        self._printed.move_to_end(text)
        if len(self._printed) > _REMEMBERED_MAX:
            self._printed.popitem(last=False)
        times = f" ({suppressed} more times meanwhile)" if suppressed else ""
        self.console.put(f"elastane[{self._node}] {text}{times}\n".encode("utf-8", "replace"))


def setup(node: str, level: str = DEFAULT_LEVEL) -> logging.Logger:
    """Make the logger `elastane` write to this process's stderr; may be called again.

    `level` is the text of LOGLEVEL; raises UsageError if it is invalid.
    """
    logger = logging.getLogger("elastane")
    logger.setLevel(level_of(level))
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(ConsoleHandler(process_console(_STDERR), node))
    return logger


def log_note(note: Note) -> None:
    """Log a note on stderr at its level."""
    logging.getLogger("elastane").log(note_level(note), "%s", note_line(note))


def flush(timeout_s: float = 1.0) -> bool:
    """Wait until every logged line is on stderr; call it before the process ends."""
    return process_console(_STDERR).wait_empty(timeout_s)


def one_line(text: str) -> str:
    """Return `text` as one bounded line without characters that control a terminal."""
    text = text[: 4 * LINE_CHARS_MAX]  # text from a peer may have megabytes
    joined = " | ".join(filter(None, (part.strip() for part in text.splitlines())))
    safe = "".join(char if char.isprintable() else "?" for char in joined)
    return safe if len(safe) <= LINE_CHARS_MAX else safe[: LINE_CHARS_MAX - 4] + " ..."
