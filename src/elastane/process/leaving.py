"""The exit of a process that called a function: the interpreter's exit without its teardown.

This module owns the order of that exit: join threads, run exit handlers, flush streams. The
teardown of modules and of C++'s static objects is left out, as multiprocessing does for its forked
children. If a process group was not destroyed, a thread of torch may call the interpreter during
teardown, which ends the process by SIGABRT ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

# The interpreter's exit code if standard output cannot be flushed.
_UNFLUSHED = 120


def run_and_leave(main: Callable[[], object]) -> NoReturn:
    """Call `main`, and end this process with the exit code that the interpreter would give it."""
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = _code_of(stop)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process in the order that the module docstring states."""
    _attempt(getattr(threading, "_shutdown"))  # noqa: B009 - typeshed lacks it
    _attempt(atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed and not _attempt(stream.flush):
            code = code or _UNFLUSHED
    os._exit(code)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


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
