"""Failures of child processes: what each of them was, and which one came first.

Owns ProcessFailure and ChildFailedError, whose text keeps torch's layout since users parse it. The
first failure is found by nanoseconds if the error files have them. It does not know how the
processes were run. Source: torch.distributed.elastic.multiprocessing.errors.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from elastane.elastic.multiprocessing.errors.error_handler import ErrorHandler
from elastane.elastic.multiprocessing.errors.handlers import get_error_handler
from elastane.process.errorfile import read_error_file
from elastane.worker import record as job_record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

P = ParamSpec("P")
R = TypeVar("R")
_NS = 1_000_000_000
_NOT_AVAILABLE = "<N/A>"
_ADVICE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_WIDTH_MAX = 60


@dataclass
class ProcessFailure:
    """The end of one child: by exit code, by signal (-N), or as its error file says.

    `error_file_data` is the file's content and `message` its message (a dict if it has a
    traceback). `timestamp` is whole seconds since 1970. An incomplete file counts as none.
    `time_ns` is the same moment in nanoseconds, from the error file if it has them.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        error = read_error_file(self.error_file) if Path(self.error_file).is_file() else None
        self._order: tuple[int, int] = (time.time_ns(), 0)
        if error is None:
            self.error_file, self.error_file_data = _NOT_AVAILABLE, {"message": "<NONE>"}
            self.message, self.timestamp = "", int(time.time())
        else:
            self.error_file_data = dict(error.raw)
            self.message = self.error_file_data.get("message", "")
            self.timestamp = error.time_ns // _NS
            self._order = (error.time_ns, error.monotonic_ns)
        if not self.message:
            self.message = self._default_message()

    @property
    def time_ns(self) -> int:
        """When it failed, in nanoseconds since 1970; without a file, when this object was made."""
        return self._order[0]

    def signal_name(self) -> str:
        """Return the name of the signal that ended it, `<N/A>` if none did."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time as YYYY-MM-DD_HH:MM:SS."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")

    def _default_message(self) -> str:
        if self.exitcode >= 0:
            return _ADVICE
        return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"


class ChildFailedError(Exception):
    """Children failed: `failures` by global rank, the earliest as root cause.

    Raised by launches; `record` copies the first failure's error file for its own parent.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        if not failures:
            raise AssertionError("a ChildFailedError without failures")
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure of the child that failed first."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].time_ns)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the report in torch's layout."""
        root_rank, _ = self.get_first_failure()
        described = {
            rank: _described(index, rank, failure)
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        title = f"{self.name} FAILED"
        lines = [line for text in described.values() for line in text.split("\n")]
        width = min(_WIDTH_MAX, max(map(len, [title, *lines])))
        border, section = boarder_delim * width, section_delim * width
        others = [text for rank, text in described.items() if rank != root_rank]
        return "\n".join(
            [
                *("", border, title, section),
                *("Failures:", *(others or ["  <NO_OTHER_FAILURES>"]), section),
                *("Root Cause (first observed failure):", described[root_rank], border),
            ]
        )


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Wrap a main function so that its parent learns its exception; see elastane.record."""
    return job_record.record(fn, error_handler or get_error_handler())


def _described(index: int, rank: int, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    by = f" ({name})" if name != _NOT_AVAILABLE else ""
    return "\n".join(
        [
            f"[{index}]:",
            f"  time      : {failure.timestamp_isoformat()}",
            f"  host      : {socket.getfqdn()}",
            f"  rank      : {rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {by}",
            f"  error_file: {failure.error_file}",
            f"  traceback : {_traceback_text(failure)}",
        ]
    )


def _traceback_text(failure: ProcessFailure) -> str:
    if not isinstance(failure.message, dict):
        return str(failure.message)
    extra = failure.message.get("extraInfo", {})
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = stack if stack is not None else failure.message.get("message", _NOT_AVAILABLE)
    return str(text).replace("\n", "\n  ")
