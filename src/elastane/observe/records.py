"""One line of the event log as a typed record, with its encoding and decoding.

Pure. This module owns the format (docs/events.md) and its bounds. A line that is no record decodes
to None; a kind that this version does not know is kept as it is.
"""

from __future__ import annotations

import math
import time

import msgspec

from elastane.protocol.log_events import Note
from elastane.protocol.unreadable import UNREADABLE

FORMAT_VERSION = 1
# One line is one write; a page of this size is appended whole by local file systems.
LINE_BYTES_MAX = 4096
REASON_CHARS_MAX = 1000
DATA_CHARS_MAX = 500
NAME_CHARS_MAX = 200
_NS = 1_000_000_000

Data = dict[str, str | int | float | bool]


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event as it stands in the log.

    `time` and `time_s`: the wall clock of the host that wrote it, for people and for merging the
    views of several hosts. `mono_s`: that host's monotonic clock, for durations. `node`: the node
    that the event is about. `host` and `pid`: the process that logged it; `seq` counts that
    process's events.
    """

    time: str
    time_s: float
    mono_s: float
    seq: int
    job: str
    kind: str
    reason: str
    node: str
    host: str
    pid: int
    round: int | None = None
    attempt: int | None = None
    data: Data = {}
    source: str = "agent"
    version: int = FORMAT_VERSION

    @property
    def order(self) -> tuple[float, str, int, int]:
        """The position in the merged view."""
        return (self.time_s, self.host, self.pid, self.seq)


class EventOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The process that logs events: the fields that all its events share."""

    job: str
    node: str
    host: str
    pid: int


def make_event(
    note: Note, origin: EventOrigin, *, source: str, seq: int, now_ns: int
) -> LoggedEvent:
    """Return the record of a note, with its texts bounded."""
    return LoggedEvent(
        time=iso_time(now_ns),
        time_s=now_ns / _NS,
        mono_s=time.monotonic(),
        seq=seq,
        job=_text(origin.job, NAME_CHARS_MAX),
        kind=note.kind,
        reason=_text(note.reason, REASON_CHARS_MAX),
        node=_text(note.node_id or origin.node, NAME_CHARS_MAX),
        host=_text(origin.host, NAME_CHARS_MAX),
        pid=origin.pid,
        round=note.fence.round if note.fence else None,
        attempt=note.fence.attempt if note.fence else None,
        data={_text(key, NAME_CHARS_MAX): _bounded(value) for key, value in note.data.items()},
        source=source,
    )


def encode_line(event: LoggedEvent) -> bytes:
    """Return the event as one line of at most `LINE_BYTES_MAX`; an oversized `data` is dropped."""
    line = msgspec.json.encode(event) + b"\n"
    if len(line) > LINE_BYTES_MAX:
        event = msgspec.structs.replace(event, data={"left_out": len(event.data)})
        line = msgspec.json.encode(event) + b"\n"
    if len(line) > LINE_BYTES_MAX:  # text with many bytes or escapes a character
        short = {name: getattr(event, name)[:100] for name in ("reason", "job", "node", "host")}
        line = msgspec.json.encode(msgspec.structs.replace(event, **short)) + b"\n"
    return line


def decode_line(line: bytes) -> LoggedEvent | None:
    """Return the event in a line, or None if the line is torn or of another format."""
    try:
        return msgspec.json.decode(line, type=LoggedEvent)
    except UNREADABLE:
        return None


def iso_time(time_ns: int) -> str:
    """Return a time in UTC with nanoseconds, in ISO 8601."""
    seconds, rest_ns = divmod(time_ns, _NS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns:09d}Z"


def _text(text: str, chars_max: int) -> str:
    """Bound a text and make it encodable, because paths may hold lone surrogates."""
    return text[:chars_max].encode("utf-8", "replace").decode("utf-8")


def _bounded(value: str | int | float | bool) -> str | int | float | bool:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return _text(value, DATA_CHARS_MAX) if isinstance(value, str) else value
