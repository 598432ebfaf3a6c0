"""Failures of child processes: their facts, and which one came first.

The classes are torch's, with one change each. A ProcessFailure knows the nanosecond, so the first
of two failures in one second is found, and an incomplete error file is no exception. `record`
writes nanoseconds too, and a full disk never hides the exception.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch.distributed.elastic.multiprocessing import errors as torchs

from elastane.elastic import use_itself
from elastane.process.errorfile import read_error_file, with_error_code
from elastane.worker import record as job_record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
use_itself(__name__, "error_handler", "handlers")

P = ParamSpec("P")
R = TypeVar("R")
_NS = 1_000_000_000
_ADVICE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


class ProcessFailure(torchs.ProcessFailure):
    """The end of one child: by exit code, by signal (-N), or as its error file says.

    `error_file_data` is the file's content and `message` its message (a dict if it has a
    traceback). `timestamp` is whole seconds since 1970. An incomplete file counts as none.
    """

    message: Any

    def __post_init__(self) -> None:
        error = read_error_file(self.error_file) if Path(self.error_file).is_file() else None
        self._order: tuple[int, int] = (time.time_ns(), 0)
        if error is None:
            self.error_file, self.error_file_data = "<N/A>", {"message": "<NONE>"}
            self.message, self.timestamp = "", int(time.time())
        else:
            self.error_file_data = dict(error.raw)
            self.message = _printable(self.error_file_data.get("message", ""))
            self.timestamp = error.time_ns // _NS
            self._order = (error.time_ns, error.monotonic_ns)
        if not self.message:
            self.message = self._default_message()

    @property
    def time_ns(self) -> int:
        """When it failed, in nanoseconds since 1970; without a file, when this object was made."""
        return self._order[0]

    def _default_message(self) -> str:
        if self.exitcode >= 0:
            return _ADVICE
        return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"


def _printable(message: Any) -> Any:
    """Return the message of an error file in a form that torch's report can print."""
    if not isinstance(message, dict):
        return message
    extra = message.get("extraInfo", {})
    text = str(message.get("message", "<N/A>"))
    if isinstance(extra, dict) and isinstance(extra.get("py_callstack", text), str):
        return {**message, "message": text}
    return text


class ChildFailedError(torchs.ChildFailedError):
    """Children failed: `failures` by global rank, the earliest as root cause.

    Raised by launches; `record` copies the first failure's error file for its own parent. Its text
    has torch's layout, which users parse.
    """

    failures: dict[int, ProcessFailure]  # type: ignore[assignment]

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        super().__init__(name, failures)  # type: ignore[arg-type]

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure of the child that failed first."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].time_ns)
        return rank, self.failures[rank]


class ErrorHandler(job_record.ErrorFileHandler):
    """Writes an exception to the file that TORCHELASTIC_ERROR_FILE names; for subclassing."""

    def _get_error_file_path(self) -> str | None:
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set the exit code in the content of `rootcause_error_file`, in place."""
        rootcause_error.update(with_error_code(rootcause_error, error_code))

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """Return the text of a worker that a signal ended; `error_file` lies beside its logs.

        torch has this hook from 2.14 on, for subclasses that know more; here it changes nothing.
        """
        return message


def get_error_handler() -> ErrorHandler:
    """Return a handler that writes to the file that TORCHELASTIC_ERROR_FILE names."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Wrap a main function so that its parent learns its exception; see elastane.record."""
    return job_record.record(fn, error_handler or get_error_handler())
