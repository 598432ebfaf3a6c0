"""The event log of a job: append-only JSON lines, one file for each host, and its readers.

This module owns the files `<log_dir>/<job>/events.<host>.jsonl`, the format of a line
(docs/events.md) and its bounds. A line that is no record decodes to None; a kind that this version
does not know is kept as it is.

A thread writes the files, so no caller waits: a full or hanging disk loses events, and their count
is written once the disk accepts lines again. A file that was removed is made again, with a warning.
Readers merge all hosts by time and skip unreadable lines.
"""

from __future__ import annotations

import bisect
import heapq
import io
import itertools
import logging
import math
import operator
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from elastane.process.files import safe_name
from elastane.process.streams.console import BackgroundWriter
from elastane.process.streams.files import ensure_base_dir, open_append
from elastane.process.streams.plan import NO_FILES
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import NO_RANK
from elastane.protocol.unreadable import UNREADABLE

_log = logging.getLogger("elastane.events")
# The events that wait for the disk: some hundred lines, while a job logs a few a minute.
QUEUE_BYTES_MAX = 256 << 10
# The time that the end of a process waits for its last events.
CLOSE_S = 1.0
# Several processes of a host write to one file, each line a moment after its timestamp. So readers
# hold back up to this many events, since an earlier one may follow.
_REORDER_MAX = 256
# Lines of a log in memory: how many are read at a time over all files, the least number for each
# file, and the factor for files that have more lines than others.
_BLOCKS_ALL, _BLOCK_MIN, _READ_ON_MAX = 8192, 64, 65_536
# The number of events that `elastane status` lists.
_LAST_COUNTS = 10
_READ_BYTES = 1 << 20
# Bytes that are read at a time of each file of a log of many hosts: more than three long lines.
_PIECE_BYTES_MIN = 16 << 10
FORMAT_VERSION = 1
# Bytes of a line. It is written at once, and local file systems append a page of this size whole.
LINE_BYTES_MAX = 4096
REASON_CHARS_MAX = 1000
DATA_CHARS_MAX = 500
NAME_CHARS_MAX = 200
# The last second of the year 9999: a log may contain any number, and later times have no ISO form.
TIME_MAX_S = 253402300799.0
# JSON's numbers have any size, but many readers only accept 64 bits.
_NUMBER_MAX = 2**53
_NS = 1_000_000_000

Data = dict[str, str | int | float | bool]
_TimedLine = tuple[float, bytes]


# gc=False: an event is in no reference cycle, and the garbage collector would scan each of them.
class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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

    def number(self, name: str) -> int | None:
        """Return a field of the data as a whole number; None if it is missing or no number."""
        value = self.data.get(name)
        if not isinstance(value, int | float):
            return None
        return int(min(max(value, -_NUMBER_MAX), _NUMBER_MAX))

    def measure(self, name: str) -> float:
        """Return a field of the data as a number; 0 if it is missing, negative or no number."""
        value = self.data.get(name)
        return float(min(max(value, 0), _NUMBER_MAX)) if isinstance(value, int | float) else 0.0

    def text(self, name: str) -> str:
        """Return a field of the data as text; "" if it is missing."""
        return str(self.data.get(name, ""))


class EventOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The process that logs events: the fields that all its events share."""

    job: str
    node: str
    host: str
    pid: int


def make_event(
    event: LogEvent, origin: EventOrigin, *, source: str, seq: int, now_ns: int
) -> LoggedEvent:
    """Return the record of an event, with its texts bounded."""
    return LoggedEvent(
        time=iso_time(now_ns),
        time_s=now_ns / _NS,
        mono_s=time.monotonic(),
        seq=seq,
        job=_text(origin.job, NAME_CHARS_MAX),
        kind=event.kind,
        reason=_text(event.reason, REASON_CHARS_MAX),
        node=_text(event.node_id or origin.node, NAME_CHARS_MAX),
        host=_text(origin.host, NAME_CHARS_MAX),
        pid=origin.pid,
        round=event.fence.round if event.fence else None,
        attempt=event.fence.attempt if event.fence else None,
        data={_text(key, NAME_CHARS_MAX): _bounded(value) for key, value in event.data.items()},
        source=source,
    )


def described(event: LoggedEvent) -> str:
    """Return an event's reason; of a worker that ended, after its rank."""
    if event.kind != EventKind.WORKER_EXITED:
        return event.reason
    rank, local_rank = event.number("rank"), event.number("local_rank")
    if rank not in (None, NO_RANK):
        return f"rank {rank}: {event.reason}"
    return event.reason if local_rank is None else f"local rank {local_rank}: {event.reason}"


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
        return _decode(line)
    except UNREADABLE:
        return None


_decode = msgspec.json.Decoder(LoggedEvent).decode


def iso_time(time_ns: int) -> str:
    """Return a time in UTC with nanoseconds, in ISO 8601."""
    seconds, rest_ns = divmod(time_ns, _NS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns:09d}Z"


def _text(text: str, chars_max: int) -> str:
    """Shorten a text and make it encodable, because paths may contain lone surrogates."""
    return text[:chars_max].encode("utf-8", "replace").decode("utf-8")


def _bounded(value: str | int | float | bool) -> str | int | float | bool:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return _text(value, DATA_CHARS_MAX) if isinstance(value, str) else value


class EventLog:
    """The event log that one process writes; `base_dir` empty or `/dev/null`: no log."""

    def __init__(self, base_dir: str, job: str, node: str, host: str) -> None:
        self._base_dir = base_dir
        self._origin = EventOrigin(job=job, node=node, host=host, pid=os.getpid())
        self.path = Path(base_dir) / safe_name(job) / f"events.{safe_name(host)}.jsonl"
        self._seq = itertools.count()
        self._fd = -1
        self._torn = False
        self._lost = 0
        self._writer = BackgroundWriter(self._write, QUEUE_BYTES_MAX, "event-log")

    def log(self, event: LogEvent, source: str) -> None:
        """Log an event of `source` (coordinator or agent); never raises, never waits."""
        if self._base_dir not in NO_FILES:
            self._writer.put(self._line(event, source))

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until every logged event is in the file, or lost; False after `timeout_s`."""
        return self._writer.wait_empty(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queue and close the file."""
        if self._writer.close(timeout_s):
            self._close_file()

    def _line(self, event: LogEvent, source: str) -> bytes:
        seq = next(self._seq)
        now_ns = time.time_ns()
        return encode_line(make_event(event, self._origin, source=source, seq=seq, now_ns=now_ns))

    def _write(self, line: bytes, dropped: int) -> None:
        """Write one line, in the writer's thread."""
        self._lost += dropped
        try:
            self._open()
            if self._lost:
                self._append(self._line(_lost_event(self._lost), "log"))
                self._lost = 0
            self._append(line)
        except OSError as error:
            if not self._lost:
                _log.warning(
                    "event log %s: %s; events are lost until it takes lines again;"
                    " next: ls -ld %s; df -h %s",
                    self.path,
                    error.strerror or error,
                    *[self.path.parent] * 2,
                )
            self._lost += 1
            self._close_file()

    def _open(self) -> None:
        if self._fd >= 0 and not self._is_in_place():
            _log.warning("event log %s was removed or replaced: another one is begun", self.path)
            self._close_file()
        if self._fd < 0:
            ensure_base_dir(self._base_dir)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_append(self.path)
            self._torn = _ends_torn(self.path)

    def _is_in_place(self) -> bool:
        """Return whether the open file is the one that readers find."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.lstat())
        except FileNotFoundError:
            return False

    def _append(self, line: bytes) -> None:
        """Append a whole line, or raise; a torn line before it is ended first."""
        data = b"\n" + line if self._torn else line
        self._torn = False
        written = os.write(self._fd, data)
        if written < len(data):
            raise OSError(f"{written} of {len(data)} bytes were taken")

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lost_event(lost: int) -> LogEvent:
    return LogEvent(
        kind=EventKind.EVENTS_LOST,
        reason=f"{lost} events before this one could not be written",
        data={"events": lost},
    )


def _ends_torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line, after a writer was killed."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - 1))
        return size_bytes > 0 and file.read(1) != b"\n"


def read_events(folder: str | Path, *, all_counts: bool = True) -> Iterator[LoggedEvent]:
    """Yield the events of a job's folder, all hosts merged by time.

    Lines that are torn or of another format are left out. Memory does not grow with the log, and no
    file stays open, so that a log may have more hosts than a process may open files.
    Without `all_counts` most step counts are left out, which nearly all lines of a long log are:
    account and story are the same without them.
    """
    files = sorted(Path(folder).glob("events.*.jsonl"))
    piece_bytes = max(_PIECE_BYTES_MIN, _READ_BYTES // max(1, len(files)))
    size = max(_BLOCK_MIN, _BLOCKS_ALL // max(1, len(files)))
    merged = _merged([_blocks(_lines(path, piece_bytes), size) for path in files])
    lines = (line for block in merged for _, line in block)
    for line in lines if all_counts else _without_most_counts(lines):
        event = decode_line(line)
        if event is not None:
            yield event


def _lines(path: Path, piece_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; one that is too long for an event is dropped."""
    offset, rest = 0, b""
    try:
        while piece := _piece(path, offset, piece_bytes):
            offset += len(piece)
            data = rest + piece
            end = data.rfind(b"\n") + 1
            yield from io.BytesIO(data[:end])
            rest = data[end:] if len(data) - end <= LINE_BYTES_MAX else b""
    except OSError as error:
        _log.warning("event log %s: %s", path, error.strerror or error)
    if rest:
        yield rest


def _piece(path: Path, offset: int, piece_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(piece_bytes)


def _without_most_counts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log without step counts that change neither account nor story.

    Of the counts between two other lines, it keeps the first, those that repeat steps until one is
    higher than all before, and the last. Measured paces repeat nothing. A checkpoint may be logged
    before an earlier count, so it does not separate counts. Step times are left out. At the end of
    the log the last ten counts are kept, which `elastane status` lists. The kind of a line is read
    before the line is decoded: to decode and account all 64,000 of a week took 1.1 s (2 cores of an
    AMD EPYC, 2026-11-28).
    """
    highest, is_past = -1, False  # `is_past`: a count since the last other line exceeded `highest`
    left: deque[bytes] = deque(maxlen=_LAST_COUNTS)
    of = b""  # the kind of the counts since the last other line
    for line in lines:
        kind_at = line.find(_KIND) + len(_KIND)
        if line.startswith(_BESIDE, kind_at):
            if line.startswith(_SAVED, kind_at):
                yield line
            continue
        kind = b""
        if line.startswith(_COUNTS, kind_at):
            kind = _PACE if line.startswith(_PACE, kind_at) else _PROGRESS
        is_count = bool(kind) and line.endswith(_LINE_END)
        if is_count and kind == of and is_past:
            left.append(line)
            continue
        if not is_count or kind != of:
            if left:
                highest = max(highest, _steps_of(left[-1]))
                yield left[-1]
                left.clear()
            of, is_past = kind if is_count else b"", False
        if is_count:
            is_past = kind == _PACE or _steps_of(line) > highest
            highest = max(highest, _steps_of(line))
        yield line
    yield from left


def _steps_of(line: bytes) -> int:
    """Return the steps in the line of a step count; -1 if it has none."""
    found = _STEPS.search(line)
    return -1 if found is None else int(found[1])


# The keys of a line stand in the order of `LoggedEvent`, and texts cannot hold a bare quote.
_TIME = b'"time_s":'
_KIND = b'"kind":"'
_PACE = f'{EventKind.PACE.value}"'.encode()
_PROGRESS = f'{EventKind.PROGRESS.value}"'.encode()
_COUNTS = (_PROGRESS, _PACE)
_SAVED = f'{EventKind.CHECKPOINT_SAVED.value}"'.encode()
_BESIDE = (_SAVED, f'{EventKind.STEP_TIMES.value}"'.encode())
_LINE_END = b"}\n"
# The digits are bounded, since a log may hold any number.
_STEPS = re.compile(rb'"steps":(\d{1,16})[,}]')


def _blocks(lines: Iterator[bytes], size: int) -> Iterator[list[_TimedLine]]:
    """Yield the lines of a file in lists of about this size, in the order of their times."""
    places = min(size // 2, _REORDER_MAX)
    waiting: list[_TimedLine] = []
    while fresh := list(itertools.islice(lines, size)):
        waiting += [(_time_of(line), line) for line in fresh]
        waiting.sort()
        yield waiting[:-places]
        del waiting[:-places]
    yield waiting


def _time_of(line: bytes) -> float:
    """Return the time in a line; 0 for a line that is no event."""
    at = line.find(_TIME) + len(_TIME)
    try:
        return float(line[at : line.find(b",", at)])
    except ValueError:
        return 0.0


class _FileQueue:
    """The lines of one file that were read and not yet merged."""

    def __init__(self, blocks: Iterator[list[_TimedLine]]) -> None:
        self.lines: list[_TimedLine] = []
        self.is_read = False
        self._blocks = blocks

    @property
    def end_s(self) -> float:
        """The time up to which the file's lines were read."""
        return math.inf if self.is_read else self.lines[-1][0]

    def read_on(self) -> int:
        """Read a block; return how many lines it has."""
        block = next(self._blocks, None)
        self.is_read = block is None
        self.lines += block or ()
        return len(block or ())

    def take(self, until_s: float) -> list[_TimedLine]:
        """Remove the lines up to `until_s`, and return them."""
        at = bisect.bisect_right(self.lines, until_s, key=operator.itemgetter(0))
        taken = self.lines[:at]
        del self.lines[:at]
        return taken


def _merged(files: Iterable[Iterator[list[_TimedLine]]]) -> Iterator[list[_TimedLine]]:
    """Yield the lines of all files in their order, as lists; `files`: their blocks.

    A list has all lines up to a time to which every file was read. Sorting such a list is several
    times as fast as a merge line by line, and lines need less memory than events.
    """
    queues = [_FileQueue(blocks) for blocks in files]
    while queues:
        for queue in queues:
            while not queue.lines and not queue.is_read:
                queue.read_on()
        queues = [queue for queue in queues if queue.lines]
        until_s = _read_until(queues)
        found: list[_TimedLine] = []
        for queue in queues:
            found += queue.take(until_s)
        found.sort()
        yield found


def _read_until(queues: Sequence[_FileQueue]) -> float:
    """Read on in files with few known lines; return the time to which every file was read.

    A file with many lines is read until the median of the others, so that few lists are made.
    """
    ends = sorted(queue.end_s for queue in queues)
    wanted_s, spare = ends[len(ends) // 2] if ends else math.inf, _READ_ON_MAX
    for queue in queues:
        while queue.end_s < wanted_s and spare > 0:
            spare -= queue.read_on()
    return min((queue.end_s for queue in queues), default=math.inf)


class PlacedEvent(NamedTuple):
    """An event, and where its line begins in which file."""

    event: LoggedEvent
    path: Path
    offset: int


class _LogTail:
    """One file of a log, read piece by piece as it grows."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self.ready: deque[PlacedEvent] = deque()
        self.offset = offset

    def fill(self, piece_bytes: int) -> bool:
        """Read on until an event is ready; return whether one is. Only whole lines are read."""
        while not self.ready:
            data = self._piece(piece_bytes)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == piece_bytes:
                end = len(data)  # no valid line is that long
            if not end:
                return False
            at = self.offset
            for line in data[:end].split(b"\n"):
                event = decode_line(line) if line else None
                if event is not None:
                    self.ready.append(PlacedEvent(event, self.path, at))
                at += len(line) + 1
            self.offset += end
        return True

    def _piece(self, piece_bytes: int) -> bytes:
        size_bytes = _size_bytes(self.path)
        if 0 < size_bytes < self.offset:
            self.offset = 0  # the file was replaced by another
        if size_bytes <= self.offset:
            return b""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(piece_bytes)
        except OSError:
            return b""  # The file may come back: on NFS a file can be missing for a moment.


class EventReader:
    """Reads a job's folder as it grows; it never waits. Memory does not grow with the log."""

    def __init__(self, folder: str | Path, *, from_now: bool = False) -> None:
        self._folder = Path(folder)
        self._tails: dict[Path, _LogTail] = {}
        self._from_now = from_now
        self._first = True

    def poll(self) -> list[LoggedEvent]:
        """Return the events since the last poll, in order of time; files may come and go."""
        new = [placed.event for placed in self.read()]
        return sorted(new, key=lambda event: event.order)

    def read(self, events_max: int | None = None) -> list[PlacedEvent]:
        """Return the next events of all hosts merged by time, at most `events_max`."""
        paths = list(self._folder.glob("events.*.jsonl"))
        piece_bytes = max(_PIECE_BYTES_MIN, _READ_BYTES // max(1, len(paths)))
        waiting: list[tuple[tuple[float, str, int, int], int, _LogTail]] = []
        for count, path in enumerate(paths):
            tail = self._tail(path)
            if tail.fill(piece_bytes):
                waiting.append((tail.ready[0].event.order, count, tail))
        self._first = False
        heapq.heapify(waiting)
        found: list[PlacedEvent] = []
        while waiting and (events_max is None or len(found) < events_max):
            _, count, tail = waiting[0]
            found.append(tail.ready.popleft())
            if tail.fill(piece_bytes):
                heapq.heapreplace(waiting, (tail.ready[0].event.order, count, tail))
            else:
                heapq.heappop(waiting)
        return found

    def share(self) -> float:
        """Return which share of the files' bytes was read, from 0 to 1."""
        sizes = {path: _size_bytes(path) for path in self._tails}
        done = sum(min(tail.offset, sizes[path]) for path, tail in self._tails.items())
        return done / total if (total := sum(sizes.values())) else 1.0

    def _tail(self, path: Path) -> _LogTail:
        if path not in self._tails:
            skip = self._first and self._from_now
            self._tails[path] = _LogTail(path, _size_bytes(path) if skip else 0)
        return self._tails[path]


def read_placed(path: Path, offset: int) -> LoggedEvent | None:
    """Return the event whose line begins at `offset`; None if the file no longer has it."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return decode_line(file.readline(LINE_BYTES_MAX * 4))
    except OSError:
        return None


def follow(
    folder: str | Path, *, is_over: Callable[[], bool] = lambda: False, poll_s: float = 0.1
) -> Iterator[LoggedEvent]:
    """Yield the existing events, then each new one, until `is_over()`."""
    reader = EventReader(folder)
    while True:
        last = is_over()
        new = reader.poll()
        yield from new
        if last and not new:
            return
        if not new:
            time.sleep(poll_s)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
