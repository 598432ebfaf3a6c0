"""`elastane.record`: a worker that fails leaves its exception where its agent finds it.

Owns what happens when a worker's main function raises. Scripts that the zygote forks are recorded
without it too. With it, the file is written where the exception is raised, before the interpreter's
teardown, also under another launcher. It never replaces the script's own exception.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from elastane.process.errorfile import (
    read_error_file,
    with_error_code,
    write_content,
    write_error_file,
)
from elastane.process.program_end import is_failure

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_VARIABLE = "TORCHELASTIC_ERROR_FILE"


class Handler(Protocol):
    """What `record` calls; torch's ErrorHandler has the same methods."""

    def initialize(self) -> None:
        """Prepare before the function runs."""

    def record_exception(self, e: BaseException) -> None:
        """Keep an exception that ended the function."""

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Keep the error of a child that this function supervised."""


class ErrorFileHandler:
    """Writes to the file that TORCHELASTIC_ERROR_FILE names; does nothing without that variable."""

    def initialize(self) -> None:
        """Make fatal signals print the stacks of all threads on stderr."""
        try:
            faulthandler.enable(all_threads=True)
        except (io.UnsupportedOperation, AttributeError, ValueError, RuntimeError) as error:
            # Standard error is not a file (in a notebook or a test), so stacks cannot be printed.
            _log.debug("no stacks of fatal signals: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Write the error file."""
        path = os.environ.get(_VARIABLE)
        if path:
            _try_to_write(lambda: write_error_file(path, e), path)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy the root cause's error file to this process's own, with its exit code."""
        path, found = os.environ.get(_VARIABLE), read_error_file(rootcause_error_file)
        if not path or found is None:
            return
        content = with_error_code(found.raw, error_code) if error_code else found.raw
        _try_to_write(lambda: write_content(path, content), path)


def _try_to_write(write: Callable[[], None], path: str) -> None:
    """Write, or say why not: the script's own exception must stay the one that is raised."""
    try:
        write()
    except OSError as error:
        sys.stderr.write(f"elastane: the error file {path} cannot be written: {error}\n")


@overload
def record(fn: Callable[P, T], error_handler: Handler | None = None) -> Callable[P, T | None]: ...


@overload
def record(
    fn: None = None, error_handler: Handler | None = None
) -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...


def record(fn: Any = None, error_handler: Handler | None = None) -> Any:
    """Wrap a worker's main function, so that its agent learns which exception ended it.

    Works bare (`@record`) and with a custom handler (`@record(error_handler=...)`), which has
    torch's methods. The exception is raised again, whether or not the file was written. As in
    torch, SystemExit with code 0 returns None. A launch that fails inside the function raises an
    error with `get_first_failure`: the error file of that first failure is copied, and none is
    written for the launch.

    Source: torch.distributed.elastic.multiprocessing.errors.record, whose file has whole seconds.
    """
    handler: Handler = error_handler or ErrorFileHandler()

    def wrap(main: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(main)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            handler.initialize()
            try:
                return main(*args, **kwargs)
            except SystemExit as error:
                if not is_failure(error):
                    return None
                raise
            except Exception as error:
                _record(handler, error)
                raise

        return recorded

    return wrap if fn is None else wrap(fn)


def _record(handler: Handler, error: Exception) -> None:
    first_failure = getattr(error, "get_first_failure", None)
    if first_failure is None:
        handler.record_exception(error)
        return
    _, failure = first_failure()
    if failure.error_file and read_error_file(failure.error_file) is not None:
        handler.dump_error_file(failure.error_file, failure.exitcode)
    else:
        # The launch is not the cause, and its child left no error file.
        _log.info("local rank %s failed without an error file", failure.local_rank)
