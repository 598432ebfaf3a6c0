"""A worker that calls a function: `python -m elastane.worker.call FOLDER`.

The caller of `elastane.launch` (or of `elastic_launch`) made the folder on this machine, and only
this user can write to it. Nothing that came over a network is unpickled. The return value is
written to the folder, by round, attempt and rank, and the caller reads it there. How it fails: an
exception of the function ends the worker and is in its error file. A function or value that cannot
be unpickled, pickled or written raises ConfigurationError.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import pickle
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from elastane.errors import ConfigurationError, ElastaneError
from elastane.process import called
from elastane.process.files import write_atomic
from elastane.process.program_end import is_failure, run_and_leave
from elastane.process.status_page import report_error
from elastane.worker.record import ErrorFileHandler

MODULE = "elastane.worker.call"
HEADER, CALL, VALUES = "call.json", "call.pickle", "values"
BEGUN, VALUE = ".begun", ".pickle"
_LOCAL_RANK = "${local_rank}"


class _Main(ModuleType):
    """Replaces the caller's `__main__`: holds the functions and classes pickled from it."""

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else _class_of_main(name)
        if found is None:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return found


def _class_of_main(name: str) -> type | None:
    """Find a class of `__main__` by its name, among all classes that exist in this process."""
    seen: set[type] = set()
    waiting: list[type] = [object]
    while waiting:
        below: set[type] = set(type.__subclasses__(waiting.pop())) - seen
        seen |= below
        waiting += below
    here = (kind for kind in seen if kind.__qualname__ == name)
    return next((kind for kind in here if kind.__module__ == "__main__"), None)


def main(argv: list[str]) -> None:
    """Call the function of the folder `argv[0]`, and write its return value there."""
    folder = Path(argv[0])
    _check_owner(folder)
    # With `-m`, `__main__` is this module; what the function pickles must not refer to it.
    sys.modules["__main__"] = _Main("__main__")
    if "RANK" in os.environ:  # a standby gets its rank later, in `elastane.init()`
        _begin(folder / VALUES)
    handler = ErrorFileHandler()
    handler.initialize()
    sys.excepthook = functools.partial(_excepthook, sys.excepthook)
    try:
        _call(folder)
    except Exception as error:
        error.__traceback__ = _user_traceback(error)
        handler.record_exception(error)
        report_error(os.environ)
        raise


def _begin(values: Path) -> Path:
    """Record that this rank has started in this world; return the path for its value."""
    world = values / f"{os.environ['ELASTANE_ROUND']}.{os.environ['ELASTANE_ATTEMPT']}"
    world.mkdir(mode=0o700, parents=True, exist_ok=True)
    rank = os.environ["RANK"]
    (world / f"{rank}{BEGUN}").touch()
    return world / f"{rank}{VALUE}"


def _call(folder: Path) -> None:
    header = json.loads((folder / HEADER).read_bytes())
    sys.argv[:] = header["argv"]
    sys.path[:] = header["path"]
    for name, text in header["sources"].items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    fn, args, kwargs = _load(folder, header["name"])
    if header["macros"]:
        args = [_substituted(arg) for arg in args]
    for part in (fn, *args, *kwargs.values()):
        _fill_main(part)
    value = None
    try:
        value = fn(*args, **kwargs)
    except SystemExit as stop:
        if is_failure(stop):
            raise
    if "RANK" in os.environ:
        # A worker that recovers in place may have entered other worlds since.
        _write_value(value, _begin(folder / VALUES), header["name"])


def _load(folder: Path, name: str) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    try:
        fn, args, kwargs = pickle.loads((folder / CALL).read_bytes())
    except Exception as error:
        raise ConfigurationError(
            f"{name}() cannot be loaded by a worker: {type(error).__name__}: {error}",
            slug="function-load",
            expected="modules that workers can import, from the import path of the caller",
            next_step="python -c 'import MODULE' in the folder of the job, with the same python",
        ) from error.with_traceback(_below_own_frames(error.__traceback__))
    return fn, args, kwargs


def _substituted(arg: Any) -> Any:
    if not isinstance(arg, str):
        return arg
    return arg.replace(_LOCAL_RANK, os.environ["LOCAL_RANK"])


def _fill_main(fn: Any) -> None:
    """Copy into `__main__` the globals of a function that was defined in the caller's `__main__`.

    Objects that the function pickles by name, such as a saved model, are then found under that
    name.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    while fn is not None:
        inner = getattr(fn, "__func__", fn)
        if getattr(inner, "__module__", "") == "__main__":
            for name, value in getattr(inner, "__globals__", {}).items():
                if not name.startswith("__"):
                    vars(sys.modules["__main__"]).setdefault(name, value)
            if hasattr(inner, "__name__"):
                vars(sys.modules["__main__"]).setdefault(inner.__name__, inner)
        fn = getattr(inner, "__wrapped__", None)


def pickled_result(value: Any, name: str) -> bytes:
    """Return the result of the function `name`, pickled; raise ConfigurationError if it cannot."""
    try:
        return called.dumps(value)
    except Exception as error:
        raise ConfigurationError(
            f"what {name}() returned cannot be pickled: {type(value).__name__}: {error}",
            slug="unpicklable",
            expected="plain data, arrays, tensors: what another process can be given",
            next_step=f"return what the caller needs of it, or write a file and return its path; "
            f"None, where {name}() has nothing to say",
        ) from None


def load_of_main(content: bytes) -> Any:
    """Load what was pickled by value from a program's `__main__`, and replace that module here."""
    if not isinstance(sys.modules["__main__"], _Main):
        sys.modules["__main__"] = _Main("__main__")
    found = pickle.loads(content)
    _fill_main(found)
    return found


def _write_value(value: Any, path: Path, name: str) -> None:
    content = pickled_result(value, name)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"what {name}() returned ({len(content)} bytes) cannot be left at {path}: {error}",
            slug="function-folder",
            expected="room in the folder for temporary files of the machine",
            next_step="TMPDIR=/a/larger/folder for the program that launches",
        ) from None


def _excepthook(
    hook: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show the exception without the frames of this module."""
    error.__traceback__ = _user_traceback(error.with_traceback(trace))
    hook(kind, error, error.__traceback__)


def _user_traceback(error: BaseException) -> TracebackType | None:
    """Return the part of the traceback below this module; all of it, for a defect of elastane's."""
    below = _below_own_frames(error.__traceback__)
    return below if isinstance(error, ElastaneError) else below or error.__traceback__


def _below_own_frames(here: TracebackType | None) -> TracebackType | None:
    below = None
    while here is not None:
        if here.tb_frame.f_code.co_filename == __file__:
            below = here.tb_next
        here = here.tb_next
    return below


def _check_owner(folder: Path) -> None:
    """Refuse a folder that another user could have written to."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"the function's folder {folder} is not this user's alone",
            slug="function-folder",
            expected=f"a folder of uid {os.getuid()} with mode 700, which elastane.launch makes",
        )


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
