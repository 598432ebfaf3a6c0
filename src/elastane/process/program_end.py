"""How the program of a worker ends: its exit code, its error for the agent, and the exit itself.

`leave` and what calls it join threads, run exit handlers and flush streams. The teardown of modules
and of C++'s static objects is left out, as multiprocessing does for its forked children. If a
process group was not destroyed, a thread of torch may call the interpreter during teardown, which
ends the process by SIGABRT ("terminate called without an active exception"). So a worker that calls
a function ends in this way, and a script that recovers in place does after any failure. Exit codes
and what is printed are those of the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from elastane.process.errorfile import write_error_file
from elastane.process.status_page import report_error

# The interpreter's exit code if standard output cannot be flushed.
_UNFLUSHED = 120
# A larger number in `sys.exit` counts as -1.
_CODE_BITS_MAX = 63


def exit_code(stop: SystemExit) -> int:
    """Return the exit code, of one byte, that the interpreter gives a process for `stop`.

    An object that is no number is an error message: the code is 1.
    """
    if stop.code is None:
        return 0
    if not isinstance(stop.code, int):
        return 1
    return (stop.code if stop.code.bit_length() <= _CODE_BITS_MAX else -1) & 0xFF


def is_failure(error: BaseException) -> bool:
    """Whether a program that ends by `error` has failed."""
    return not isinstance(error, SystemExit) or exit_code(error) != 0


def leave_error(error: BaseException, pid: int, environ: Mapping[str, str]) -> None:
    """Leave the failure that ends the program for the agent of this worker.

    It is reported on the status page, unless this is a child that the worker, of process `pid` and
    with `environ`, has forked. An error or a text is also in the error file, unless the script's
    `record` wrote it. A number has nothing to say, and an interrupt comes from outside.
    """
    if os.getpid() == pid:
        report_error(environ)
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    is_number = isinstance(error, SystemExit) and isinstance(error.code, int)
    if not path or is_number or isinstance(error, KeyboardInterrupt) or Path(path).exists():
        return
    with contextlib.suppress(OSError):  # the traceback is on stderr as well
        write_error_file(path, error)


def below_frames_of(file: str, full: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frames of our module in `file`: the script's."""
    below, here = full, full
    while here is not None:
        if here.tb_frame.f_code.co_filename == file:
            below = here.tb_next
        here = here.tb_next
    return below


def run_and_leave(main: Callable[[], object]) -> NoReturn:
    """Call `main`, and end this process with the exit code that the interpreter would give it."""
    try:
        main()
    except BaseException as error:
        leave_by(error)
    leave(0)


def leave_by(error: BaseException) -> NoReturn:
    """Show the error that has ended the program, and end this process as the module says."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            _attempt(lambda: sys.stderr.write(f"{error.code}\n"))
        leave(exit_code(error))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    _attempt(lambda: sys.excepthook(type(error), error, error.__traceback__))
    leave(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def leave(code: int) -> NoReturn:
    """End this process in the order that the module docstring states; a negative code: a signal."""
    _attempt(getattr(threading, "_shutdown"))  # noqa: B009 - typeshed lacks it
    _attempt(atexit._run_exitfuncs)
    flush_and_end(code)


def flush_and_end(code: int) -> NoReturn:
    """Flush the standard streams and end this process; a negative code: by that signal."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed and not _attempt(stream.flush):
            code = code or _UNFLUSHED
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _attempt(step: Callable[[], Any]) -> bool:
    """Run one step of the exit; print its exception, so that the other steps still run."""
    try:
        step()
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:
            return False
        return False
    return True
