"""The output of agent and coordinator on stderr: lines for a person, or events in torch's form.

This module owns the logger `elastane`, its level (LOGLEVEL, as torchrun reads it) and the choice of
kinds that a person must see. A stuck or closed stderr loses lines and blocks no caller: the
console's own thread writes them.

`event_handler` is the handler of --event-log-handler: it discards events, or prints them as torch
does, as JSON objects with name, source, timestamp and metadata. An event of elastane that means the
same as one of torch's has its name; the others keep their own. The event log under --log-dir is
written in any case.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from elastane.errors import UsageError
from elastane.observe.events import EventOrigin
from elastane.process.streams.console import Console, process_console
from elastane.protocol.log_events import MEASURED, EventKind, LogEvent

DEFAULT_LEVEL = "WARNING"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LINE_CHARS_MAX = 1000
# A repetition within this time is counted instead of printed. An agent that looks for its
# coordinator would otherwise print a line several times a second.
REPEAT_S = 10.0
# The same for a line about a subject of which the figures differ each time, such as a slow rank.
REPEAT_SUBJECT_S = 600.0
_REMEMBERED_MAX = 64
_STDERR = 2
# The names of handlers in torch 2.13; its dynamic_rendezvous also writes nothing.
HANDLERS = ("null", "console", "dynamic_rendezvous")
EventHandler = Callable[[LogEvent, str], None]
_STATUS = "torchelastic.worker.status."
_STATES = {EventKind.ROUND_SETTLED: "RENDEZVOUS", EventKind.WORKERS_STARTING: "START"}

# Events that a person must see at the default level: a failure, or a job that waits for a person.
_WARNINGS = frozenset(
    {
        EventKind.AUTHORITY_LOST,
        EventKind.COORDINATOR_AWAY,
        EventKind.CULPRIT,
        EventKind.EVENTS_LOST,
        EventKind.GROWTH,
        EventKind.INCIDENT,
        EventKind.NODE_DEPARTED,
        EventKind.NODE_REFUSED,
        EventKind.NOT_RESUMED,
        EventKind.REPLACEMENT,
        EventKind.RESTART,
        EventKind.SIGNAL,
        EventKind.STALL,
        EventKind.STRAGGLER,
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


def event_level(event: LogEvent) -> int:
    """Return the log level of an event."""
    if event.kind in MEASURED:
        return logging.DEBUG
    return logging.WARNING if event.kind in _WARNINGS else logging.INFO


def event_text(event: LogEvent) -> str:
    """Return an event as `kind: reason`, with its fence unless the reason names a round."""
    where = f" ({event.fence})" if event.fence and "round" not in event.reason else ""
    return f"{event.kind}: {event.reason}{where}"


def event_subject(event: LogEvent) -> str:
    """Return what an event repeats although its figures or its round differ; "" for most."""
    data = event.data
    match event.kind:
        case EventKind.STRAGGLER:
            return f"{event.kind} {event.node_id} {data.get('rank')} {data.get('why')}"
        case EventKind.CULPRIT:
            return f"{event.kind} {event.node_id} {data.get('class')} {data.get('ranks')}"
        case EventKind.WAITING:
            return f"{event.kind} {event.reason}"
    return ""


class ConsoleHandler(logging.Handler):
    """Writes records to a console as lines `elastane[node] text`, without control characters.

    A line repeated within `REPEAT_S` is counted, and the count is printed when the line comes again
    after that. A record with a `subject` repeats any other about it, for `REPEAT_SUBJECT_S`.
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
            self._print(text, getattr(record, "subject", ""))
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)

    def _print(self, text: str, subject: str) -> None:
        now_s, key = time.monotonic(), subject or text
        pause_s = REPEAT_SUBJECT_S if subject else REPEAT_S
        printed_s, suppressed = self._printed.get(key, (-pause_s, 0))
        if now_s - printed_s < pause_s:
            self._printed[key] = (printed_s, suppressed + 1)
            return
        self._printed[key] = (now_s, 0)
        self._printed.move_to_end(key)
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


def log_event(event: LogEvent) -> None:
    """Log an event on stderr at its level."""
    extra = {"subject": event_subject(event)}
    logging.getLogger("elastane").log(event_level(event), "%s", event_text(event), extra=extra)


def flush(timeout_s: float = 1.0) -> bool:
    """Wait until every logged line is on stderr; call it before the process ends."""
    return process_console(_STDERR).wait_empty(timeout_s)


def one_line(text: str) -> str:
    """Return `text` as one bounded line without characters that control a terminal."""
    text = text[: 4 * LINE_CHARS_MAX]  # text from a peer may have megabytes
    joined = " | ".join(filter(None, (part.strip() for part in text.splitlines())))
    safe = "".join(char if char.isprintable() else "?" for char in joined)
    return safe if len(safe) <= LINE_CHARS_MAX else safe[: LINE_CHARS_MAX - 4] + " ..."


def event_handler(name: str, origin: EventOrigin) -> EventHandler:
    """Return the named handler; it is called with each event and its source.

    The source is agent or coordinator.
    """
    assert name in HANDLERS, name
    if name != "console":
        return discard
    console = process_console(_STDERR)

    def handle(event: LogEvent, source: str) -> None:
        console.put(event_line(event, source, origin, time.time()))

    return handle


def discard(event: LogEvent, source: str) -> None:
    """Discard the event."""


def event_line(event: LogEvent, source: str, origin: EventOrigin, now_s: float) -> bytes:
    """Return an event as one line in the form of torch's events."""
    state = _state(event)
    line = {
        "name": _STATUS + state if state else f"elastane.{event.kind}",
        "source": "WORKER" if event.kind is EventKind.WORKER_EXITED else "AGENT",
        "timestamp": int(now_s),
        "metadata": {
            "run_id": origin.job,
            "hostname": origin.host,
            "state": state or str(event.kind),
            "global_rank": event.data.get("rank"),
            "worker_id": event.data.get("pid"),
            "raw_error": event.reason if state == "FAILED" else None,
            "told_by": source,
            "reason": event.reason,
            "node": event.node_id or origin.node,
            "round": event.fence.round if event.fence else None,
            "attempt": event.fence.attempt if event.fence else None,
            **{f"data_{key}": value for key, value in event.data.items()},
        },
    }
    return msgspec.json.encode(line) + b"\n"


def _state(event: LogEvent) -> str:
    """Return torch's name for the event, or an empty string."""
    if event.kind is EventKind.WORKER_EXITED:
        return "FAILED" if event.data.get("exit_code", 0) else "SUCCEEDED"
    if event.kind is EventKind.JOB_ENDED:
        return "SUCCEEDED" if event.data.get("ok", True) else "FAILED"
    return _STATES.get(event.kind, "")
