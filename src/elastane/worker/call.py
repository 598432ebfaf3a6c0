"""A worker that calls a function: `python -m elastane.worker.call FOLDER`.

The folder is this user's own, made by the caller of `elastane.launch` (or of `elastic_launch`) on
this machine: nothing that came over a network is unpickled. What the function returns is left
there, by round, attempt and rank, for the caller to read. How it fails: the function's own
exception ends the worker and is on its error file; what cannot be unpickled, pickled or written is
a ConfigurationError that says so.
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
from elastane.process import by_value
from elastane.process.files import write_atomic
from elastane.process.leaving import run_and_leave
from elastane.worker.record import ErrorFileHandler

MODULE = "elastane.worker.call"
HEADER, CALL, VALUES = "call.json", "call.pickle", "values"
BEGUN, VALUE = ".begun", ".pickle"
_LOCAL_RANK = "${local_rank}"


class _Main(ModuleType):
    """Stands for the caller's `__main__`: has the classes that came from there, with what came."""

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else _class_of_main(name)
        if found is None:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return found


def _class_of_main(name: str) -> type | None:
    """Return the class that was made under this name; asked where a name is not there yet."""
    seen: set[type] = set()
    waiting: list[type] = [object]
    while waiting:
        below: set[type] = set(type.__subclasses__(waiting.pop())) - seen
        seen |= below
        waiting += below
    here = (kind for kind in seen if kind.__qualname__ == name)
    return next((kind for kind in here if kind.__module__ == "__main__"), None)


def main(argv: list[str]) -> None:
    """Call the function of the folder `argv[0]`, and leave what it returns there."""
    folder = Path(argv[0])
    _insist_on_own(folder)
    # The interpreter of `-m` leads to this module; what the function pickles is not of it.
    sys.modules["__main__"] = _Main("__main__")
    if "RANK" in os.environ:  # else it waits for a place, which `elastane.init()` finds
        _begin(folder / VALUES)
    handler = ErrorFileHandler()
    handler.initialize()
    sys.excepthook = functools.partial(_show, sys.excepthook)
    try:
        _work(folder)
    except Exception as error:
        error.__traceback__ = _function_s(error)
        handler.record_exception(error)
        raise


def _begin(values: Path) -> Path:
    """Note that the worker of this rank has begun in this world; returns where its value goes."""
    world = values / f"{os.environ['ELASTANE_ROUND']}.{os.environ['ELASTANE_ATTEMPT']}"
    world.mkdir(mode=0o700, parents=True, exist_ok=True)
    rank = os.environ["RANK"]
    (world / f"{rank}{BEGUN}").touch()
    return world / f"{rank}{VALUE}"


def _work(folder: Path) -> None:
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
        if stop.code not in (0, None):
            raise
    if "RANK" in os.environ:
        # In the world that it is in by now: one that recovers in place has entered others.
        _leave(value, _begin(folder / VALUES), header["name"])


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
    """Make `__main__` hold what a function's own `__main__` did, as far as it uses it.

    So what it pickles by name, a model that it saves for one, is found under that name.
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
    """Return what the function `name` returned, pickled; ConfigurationError that names it else."""
    try:
        return by_value.dumps(value)
    except Exception as error:
        raise ConfigurationError(
            f"what {name}() returned cannot be pickled: {type(value).__name__}: {error}",
            slug="unpicklable",
            expected="plain data, arrays, tensors: what another process can be given",
            next_step=f"return what the caller needs of it, or write a file and return its path; "
            f"None, where {name}() has nothing to say",
        ) from None


def load_of_main(content: bytes) -> Any:
    """Load what was pickled by value from a program's `__main__`, and stand in for that module."""
    if not isinstance(sys.modules["__main__"], _Main):
        sys.modules["__main__"] = _Main("__main__")
    found = pickle.loads(content)
    _fill_main(found)
    return found


def _leave(value: Any, path: Path, name: str) -> None:
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


def _show(
    hook: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show what ended the function as if nothing had called it."""
    error.__traceback__ = _function_s(error.with_traceback(trace))
    hook(kind, error, error.__traceback__)


def _function_s(error: BaseException) -> TracebackType | None:
    """Return the part of its traceback that is the function's; all, where the defect is ours."""
    below = _below_own_frames(error.__traceback__)
    return below if isinstance(error, ElastaneError) else below or error.__traceback__


def _below_own_frames(here: TracebackType | None) -> TracebackType | None:
    below = None
    while here is not None:
        if here.tb_frame.f_code.co_filename == __file__:
            below = here.tb_next
        here = here.tb_next
    return below


def _insist_on_own(folder: Path) -> None:
    """Refuse a folder that another user could have written in."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"the function's folder {folder} is not this user's alone",
            slug="function-folder",
            expected=f"a folder of uid {os.getuid()} with mode 700, which elastane.launch makes",
        )


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
