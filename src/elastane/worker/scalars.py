"""The scalars that a job logs (`job.log`): each reaches its sinks once per committed step.

One worker writes. The other workers keep their newest values, so that the next writer adds what a
lost one had not written. A step that is retried replaces its values, and a step that a
sink has already is left out, as after a restart from an older checkpoint. A sink that cannot be
written costs values and not the job. It does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from elastane.errors import JobError
from elastane.process import environment
from elastane.process.files import safe_name
from elastane.worker.service_sinks import RETRY_FIRST_S, RETRY_MAX_S, ServiceSink
from elastane.worker.sink_process import END_WITHIN_S, KEPT_MAX, Scalars

# Ranks are below this, so that a place in the order of writers is one number.
_RANKS = 1 << 24
_STEPS = 1 << 38
_BLOCK_BYTES = 1 << 16
_PACE_S = 1.0
# More than the beginning of an event file.
_ROOM_BYTES = 1 << 12
_OPEN = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
SLUG = "job-log"


@runtime_checkable
class Sink(Protocol):
    """A place for scalars. Only one worker of the job has it open, at one time."""

    def open(self, after_step: int | None) -> Mapping[str, int]:
        """Open it; return the last step of each name that it has of this run beyond `after_step`.

        None: another run begins, of which it has nothing. An error here or in `write` loses no
        values yet: it is opened again at the next step, then after a pause that grows to a minute.
        """

    def write(self, scalars: Scalars) -> None:
        """Add values."""

    def close(self) -> None:
        """Close it; another worker may open it afterwards."""


class JsonLines:
    """A file with a JSON object in each line: `step`, `time` and the values by their names.

    A value that is not finite is a text: "NaN", "Infinity" or "-Infinity".
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = -1

    def open(self, after_step: int | None) -> Mapping[str, int]:
        """Open the file, and cut off a line that was not written to its end.

        A symbolic link is an OSError: another user of the folder could make it lead elsewhere.
        """
        try:
            self._file = os.open(self.path, _OPEN, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                what = "a symbolic link, which is not followed"
                raise OSError(errno.ELOOP, what, str(self.path)) from error
            raise
        found: dict[str, int] = {}
        later = _STEPS
        for at, line in _backwards(self._file, os.lseek(self._file, 0, os.SEEK_END)):
            if not line.endswith(b"\n"):
                os.ftruncate(self._file, at)
                continue
            entry = _entry_of(line)
            step = entry.get("step", 0)
            # Steps that grow backwards are of an older run.
            if after_step is None or not after_step < step <= later:
                break
            later = step
            for name in entry:
                found.setdefault(name, step)
        return found

    def write(self, scalars: Scalars) -> None:
        """Append a line."""
        values = {name: _spelled(value) for name, value in scalars.values.items()}
        line = {"step": scalars.step, "time": round(scalars.time_s, 3), **values}
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) < len(data):  # `open` cuts off what was written of it.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JobFolder(JsonLines):
    """The file in the job's folder that its page reads; of each name it has a line a second.

    So a week of training takes some 50 MB.
    """

    def __init__(self, folder: str, node: str) -> None:
        super().__init__(Path(folder) / f"scalars.{safe_name(node)}.jsonl")
        self._last_s: dict[str, float] = {}

    def write(self, scalars: Scalars) -> None:
        """Append a line of the names whose last one is a second old."""
        at_s, last_s = scalars.time_s, self._last_s
        due = {n: v for n, v in scalars.values.items() if abs(at_s - last_s.get(n, 0.0)) >= _PACE_S}
        last_s.update(dict.fromkeys(due, at_s))
        if due:
            super().write(scalars._replace(values=due))


class TensorBoard:
    """A folder that TensorBoard shows; needs the package tensorboard.

    The file `elastane.jsonl` in it lists the values that were written. A worker that continues it
    hides what lies beyond that.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self._journal = JsonLines(self.path / "elastane.jsonl")
        self._writer: Any = None

    def open(self, after_step: int | None) -> Mapping[str, int]:
        """Open another event file in the folder."""
        from torch.utils.tensorboard import SummaryWriter

        self.path.mkdir(parents=True, exist_ok=True)
        _require_room(self.path)
        found = self._journal.open(after_step)
        first = max([-1 if after_step is None else after_step, *found.values()]) + 1
        self._writer = SummaryWriter(str(self.path), purge_step=first)
        return found

    def write(self, scalars: Scalars) -> None:
        """Add the values, and then note in `elastane.jsonl` that they were written."""
        for name, value in scalars.values.items():
            self._writer.add_scalar(name, value, scalars.step, scalars.time_s)
        self._writer.flush()
        self._journal.write(scalars)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._journal.close()


class _SinkFailures(NamedTuple):
    """A sink that has failed: the last pause before another try, and when that is (monotonic)."""

    pause_s: float
    again_s: float


class ScalarLog:
    """The scalars of one worker, and the sinks, which are open on the writer alone."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        # The last step of each name that a sink has, by the sink's number.
        self._written: dict[int, dict[str, int]] = {}
        self._open: set[int] = set()
        self._kept: deque[Scalars] = deque(maxlen=KEPT_MAX)
        self._pending: dict[str, float] = {}
        self._in_body = False
        self._failures: dict[int, _SinkFailures] = {}
        self._is_writer = False
        # How many steps were committed as this worker became the writer; None: the run began so.
        self._begun: int | None = None

    def add_sinks(self, targets: tuple[Any, ...]) -> None:
        """Write to these from now on; a path is a file of JSON lines."""
        for target in targets:
            sink = JsonLines(target) if isinstance(target, (str, os.PathLike)) else target
            if not isinstance(sink, Sink):
                raise JobError(
                    f"job.log_to({target!r}): a {type(target).__name__}",
                    expected="a path, elastane.TensorBoard(folder) or another sink of"
                    " docs/scalars.md, or an object with open, write and close",
                    next_step="see docs/scalars.md",
                    slug=SLUG,
                )
            _make_folder_of(sink)
            self._sinks.append(sink)

    def show_in_job(self) -> None:
        """Write to the folder of the job as well, for its page, if an agent has named one."""
        if folder := environment.get("ELASTANE_JOB_FOLDER"):
            self._sinks.append(JobFolder(folder, environment.get("ELASTANE_NODE")))

    def begin(self) -> None:
        """Begin the body of a step: what a body before it had logged was not committed."""
        self._pending, self._in_body = {}, True

    def leave(self) -> None:
        """Leave the body; its values wait for the commit."""
        self._in_body = False

    def add(self, values: Mapping[str, Any], committed: int) -> None:
        """Log values: for the step whose body runs, else for the last of `committed` steps."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        if self._in_body:
            self._pending.update(numbers)
        else:
            self._keep(committed, numbers)

    def commit(self, committed: int) -> None:
        """Log what the body of the last step has logged, which is committed."""
        pending, self._pending = self._pending, {}
        if pending:
            self._keep(committed, pending)

    def place(self, rank: int) -> int:
        """Return this worker's place in the order of writers: the lowest of all writes."""
        newest = self._kept[-1].step if self._kept else 0
        return (_STEPS - newest) * _RANKS + rank

    def enter(self, *, is_writer: bool, committed: int, is_first: bool) -> None:
        """Enter a world, in which this worker writes or not; `is_first`: the first of the run."""
        if not is_writer:
            self.close()
            return
        if not self._is_writer:
            self._is_writer = True
            self._begun = None if is_first and not committed else committed
        self._write()

    def close(self) -> None:
        """Close the sinks."""
        self._is_writer = False
        for number in self._open:
            with contextlib.suppress(Exception):
                self._sinks[number].close()
        self._open, self._written = set(), {}

    def end(self) -> None:
        """Close the sinks as the worker ends; services get a bounded time for the last values."""
        until_s = time.monotonic() + END_WITHIN_S
        for sink in self._sinks:
            if isinstance(sink, ServiceSink):
                sink.finish(until_s)
        if self._is_writer and self._failures:
            self._write(last=True)
        self.close()

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        self._kept.append(Scalars(step, time.time(), values))
        if self._is_writer:
            self._write()

    def _write(self, *, last: bool = False) -> None:
        """Bring all sinks up to date; one that fails is opened again later, or now if it is `last`.

        A full disk may stay full for hours, so the pause grows: each try costs time of a step, and
        TensorBoard a file.
        """
        if not self._kept:
            return
        for number, sink in enumerate(self._sinks):
            failures = self._failures.get(number)
            if failures is not None and not last and time.monotonic() < failures.again_s:
                continue
            try:
                self._bring_up(number, sink)
            except Exception as error:
                self._open.discard(number)
                with contextlib.suppress(Exception):
                    sink.close()
                self._put_off(number, error)
            else:
                if self._failures.pop(number, None) is not None:
                    sys.stderr.write(f"elastane: job.log: {_where(sink)} is written again\n")

    def _put_off(self, number: int, error: Exception) -> None:
        """Schedule the next try of a sink that failed; print the first failure only.

        The next try is at the next step, later ones are after a pause that doubles.
        """
        failures = self._failures.get(number)
        if failures is not None:
            pause_s = min(max(2 * failures.pause_s, RETRY_FIRST_S), RETRY_MAX_S)
            self._failures[number] = _SinkFailures(pause_s, time.monotonic() + pause_s)
            return
        self._failures[number] = _SinkFailures(0.0, 0.0)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        sys.stderr.write(
            f"elastane: job.log: {_where(self._sinks[number])} cannot be written: {reason};"
            f" the last {KEPT_MAX} values are kept, and it is tried again [{SLUG}]\n"
        )

    def _bring_up(self, number: int, sink: Sink) -> None:
        written = self._written.setdefault(number, {})
        if number not in self._open:
            after_step = self._known_before()
            if written and (left := self._unwritten(written)):
                # It failed, perhaps in the middle of these entries; earlier ones were written.
                after_step = left[0].step - 1
            written.update(sink.open(after_step))
            self._open.add(number)
        for one in self._unwritten(written):
            missing = {n: v for n, v in one.values.items() if one.step > written.get(n, -1)}
            if missing:
                sink.write(one._replace(values=missing))
                written.update(dict.fromkeys(missing, one.step))

    def _known_before(self) -> int | None:
        """Return the step after which a sink may already have the values of this worker."""
        if self._begun is None:
            return None
        return min([self._begun, *(one.step - 1 for one in self._kept)])

    def _unwritten(self, written: Mapping[str, int]) -> list[Scalars]:
        """Return the newest values, from the first on that a sink may lack."""
        newest: list[Scalars] = []
        for one in reversed(self._kept):
            if all(one.step <= written.get(name, -1) for name in one.values):
                break
            newest.append(one)
        return newest[::-1]


def _number(name: str, value: Any) -> float:
    """Return a value as a number; a tensor's is awaited."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"job.log({name}={value!r})",
            expected="a number, or a tensor with one element",
            next_step=f"log {name} as a number, such as {name}.mean()",
            slug=SLUG,
        ) from error


def _where(sink: Sink) -> object:
    return getattr(sink, "path", type(sink).__name__)


def _require_room(folder: Path) -> None:
    """Raise OSError if the folder takes no bytes.

    TensorBoard finds out in a thread, which prints a traceback and leaves a file for each try.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if (file.write(bytes(_ROOM_BYTES)) or 0) < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _entry_of(line: bytes) -> dict[str, Any]:
    """Return a line's object; empty for a line of another program."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else {}


def _spelled(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _make_folder_of(sink: Sink) -> None:
    """Make the folder of a file, so that a path that is wrong is an error at once."""
    if not isinstance(sink, JsonLines):
        return
    try:
        sink.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(
            f"job.log_to({str(sink.path)!r}): {error.strerror or error}",
            expected="a file in a folder that can be made",
            next_step="name another path",
            slug=SLUG,
        ) from error


def _backwards(file: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their places, the last first."""
    rest = b""
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        rest = os.pread(file, end - begin, begin) + rest
        first, *lines = rest.splitlines(keepends=True)
        at = begin + len(rest)
        for line in reversed(lines):
            at -= len(line)
            yield at, line
        rest, end = first, begin
    if rest:
        yield 0, rest
