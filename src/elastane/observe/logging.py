"""What agent and coordinator say on stderr: one line a note, and nothing twice.

It owns the logger `elastane`, its level (LOGLEVEL, as torchrun reads it) and which kinds a
person must know. It knows nothing of where notes come from. A stuck or closed stderr costs
lines, never time: the console's own thread writes them.
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
    "note_level",
    "note_line",
    "one_line",
    "render_box",
    "setup",
    "tell",
]

DEFAULT_LEVEL = "WARNING"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LINE_CHARS_MAX = 1000
# The same line again within this is counted instead of said: an agent that looks for its
# coordinator would otherwise say so several times a second.
REPEAT_S = 10.0
_REMEMBERED_MAX = 64
_STDERR = 2

# What a person must know at the default level: it went wrong, or the job waits for somebody.
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
    """Return the level that LOGLEVEL names, in letters of any case or as a number."""
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
    """Return how much a note matters to a person."""
    return logging.WARNING if note.kind in _WARNINGS else logging.INFO


def note_line(note: Note) -> str:
    """Return a note as `kind: reason`, with its fence unless the reason names a round."""
    where = f" ({note.fence})" if note.fence and "round" not in note.reason else ""
    return f"{note.kind}: {note.reason}{where}"


class ConsoleHandler(logging.Handler):
    """Hands records to a console as lines `elastane[node] text`, control characters removed.

    A line that was said within the last `REPEAT_S` is counted, and the count is said when the
    line comes again after that.
    """

    def __init__(self, console: Console, node: str) -> None:
        super().__init__()
        self.console = console
        self._node = node
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as one line."""
        try:
            text = one_line(record.getMessage())
            if record.exc_info:
                text += " | " + one_line(logging.Formatter().formatException(record.exc_info))
            self._say(text)
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)

    def _say(self, text: str) -> None:
        now_s = time.monotonic()
        said_s, unsaid = self._said.get(text, (-REPEAT_S, 0))
        if now_s - said_s < REPEAT_S:
            self._said[text] = (said_s, unsaid + 1)
            return
        self._said[text] = (now_s, 0)
        self._said.move_to_end(text)
        if len(self._said) > _REMEMBERED_MAX:
            self._said.popitem(last=False)
        times = f" ({unsaid} more times meanwhile)" if unsaid else ""
        self.console.put(f"elastane[{self._node}] {text}{times}\n".encode("utf-8", "replace"))


def setup(node: str, level: str = DEFAULT_LEVEL) -> logging.Logger:
    """Make the logger `elastane` write to this process's stderr; may be called again.

    `level` is the text of LOGLEVEL; raises UsageError where it is none.
    """
    logger = logging.getLogger("elastane")
    logger.setLevel(level_of(level))
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(ConsoleHandler(process_console(_STDERR), node))
    return logger


def tell(note: Note) -> None:
    """Say a note on stderr, if its level asks for that."""
    logging.getLogger("elastane").log(note_level(note), "%s", note_line(note))


def flush(timeout_s: float = 1.0) -> bool:
    """Wait until all that was said is on stderr; to be called before the process ends."""
    return process_console(_STDERR).wait_empty(timeout_s)


def one_line(text: str) -> str:
    """Return `text` as one bounded line that cannot steer a terminal."""
    text = text[: 4 * LINE_CHARS_MAX]  # A peer's words may have megabytes.
    joined = " | ".join(filter(None, (part.strip() for part in text.splitlines())))
    safe = "".join(char if char.isprintable() else "?" for char in joined)
    return safe if len(safe) <= LINE_CHARS_MAX else safe[: LINE_CHARS_MAX - 4] + " ..."
