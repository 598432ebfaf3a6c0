"""`elastane.record`: a worker that fails leaves its exception where its agent finds it.

Owns what is done when a worker's main function raises. Scripts without it are recorded too where
they are forked by the zygote; with it, the file is written where the exception is, before the
interpreter's teardown, and also where the script is started by somebody else's launcher. It never
replaces the script's own exception by one of its own.
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

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_VARIABLE = "TORCHELASTIC_ERROR_FILE"


class Handler(Protocol):
    """What `record` calls; torch's ErrorHandler has the same methods."""

    def initialize(self) -> None:
        """Get ready before the function runs."""

    def record_exception(self, e: BaseException) -> None:
        """Keep an exception that ended the function."""

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Keep the error of a child that was this function's to supervise."""


class ErrorFileHandler:
    """Writes to the file that TORCHELASTIC_ERROR_FILE names; does nothing where it is not set."""

    def initialize(self) -> None:
        """Have fatal signals show the stacks of all threads on stderr."""
        try:
            faulthandler.enable(all_threads=True)
        except (io.UnsupportedOperation, AttributeError, ValueError, RuntimeError) as error:
            # Standard error is no file (a notebook, a test): then there is nowhere to show them.
            _log.debug("no stacks of fatal signals: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Write the error file."""
        path = os.environ.get(_VARIABLE)
        if path:
            _keep(lambda: write_error_file(path, e), path)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy the root cause's error file to this process's own, with its exit code."""
        path, found = os.environ.get(_VARIABLE), read_error_file(rootcause_error_file)
        if not path or found is None:
            return
        content = with_error_code(found.raw, error_code) if error_code else found.raw
        _keep(lambda: write_content(path, content), path)


def _keep(write: Callable[[], None], path: str) -> None:
    """Write, or say why not: the script's own exception is what must be seen."""
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
    """Wrap a worker's main function, so that the exception that ends it is kept for its agent.

    Works bare (`@record`) and with a handler of one's own (`@record(error_handler=...)`), which
    has torch's methods. The exception is raised again, whatever became of the file. As torch's:
    SystemExit with code 0 returns None; a failed launch within the function (an error that has
    `get_first_failure`) hands on the error file of its first failure, and writes none of its own.

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
                if error.code in (0, None):
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
        # The launch is no cause: what its child said, if anything, is not known here.
        _log.info("local rank %s failed without an error file", failure.local_rank)
