"""Support for a process that runs a function: functions pickled by value, and its exit.

cloudpickle 3.1.3 replaces the file name of each code object by `<dynamic-code>`, so that equal
functions have equal pickles. The traceback of a worker would then show neither file nor line of the
user's function, so this module restores the file names. It fails as cloudpickle does.

The exit joins threads, runs exit handlers and flushes streams. The teardown of modules and of C++'s
static objects is left out, as multiprocessing does for its forked children. If a process group was
not destroyed, a thread of torch may call the interpreter during teardown, which ends the process by
SIGABRT ("terminate called without an active exception"). So a script that recovers in place ends in
this way after an error, too.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import sys
import threading
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

# The interpreter's exit code if standard output cannot be flushed.
_UNFLUSHED = 120


def dumps(thing: Any) -> bytes:
    """Return `thing` pickled, with functions and classes of `__main__` by value."""
    buffer = io.BytesIO()
    _pickler()(buffer).dump(thing)
    return buffer.getvalue()


@functools.cache
def _pickler() -> Callable[[io.BytesIO], Any]:
    """Return cloudpickle's pickler with a reducer that keeps the file names of code objects."""
    import cloudpickle

    reducers = cloudpickle.CloudPickler.dispatch_table
    reduce_code = reducers[CodeType]

    def reduce(code: CodeType) -> tuple[Any, ...]:
        make, parts = reduce_code(code)
        return _with_file_name, (make, parts, code.co_filename)

    table = ChainMap({CodeType: reduce}, reducers)
    made: Callable[[io.BytesIO], Any] = type(
        "Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table}
    )
    return made


def _with_file_name(make: Callable[..., CodeType], parts: tuple[Any, ...], name: str) -> CodeType:
    return make(*parts).replace(co_filename=name)


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
