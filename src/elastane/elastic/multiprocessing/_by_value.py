"""Sends functions of the main program to a spawned child by value, if it cannot import them.

A child of multiprocessing imports the main program again. That fails for a program that launches at
its top level, without `if __name__ == "__main__":`, since the import would launch again. It also
fails without a file (a notebook, `python -c`). A function that cannot be pickled raises
ConfigurationError.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from elastane.errors import ConfigurationError
from elastane.functions.payload import name_of
from elastane.process import by_value
from elastane.worker.call import load_of_main

_starting = threading.Lock()


class ByValue:
    """An object of the main program, pickled by value; unpickling returns the object itself."""

    def __init__(self, thing: Any) -> None:
        try:
            self._content = by_value.dumps(thing)
        except Exception as error:
            raise ConfigurationError(
                f"{name_of(thing)} of the main program cannot be sent to the workers: "
                f"{type(error).__name__}: {error}",
                slug="unpicklable",
                expected="a function, and what it uses, that can be pickled",
                next_step='launch below `if __name__ == "__main__":`, or import the function',
            ) from error

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return load_of_main, (self._content,)


def must_go_by_value(fn: Any, start_method: str) -> bool:
    """Whether a child could not import `fn`; call it while the program launches `fn`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if start_method == "fork" or getattr(fn, "__module__", None) != "__main__":
        return False
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is None or _launches_unguarded(path)


def of_main_by_value(arg: Any) -> Any:
    """Return an argument in the form to send: by value if it, or its class, is of `__main__`."""
    places = (getattr(arg, "__module__", None), type(arg).__module__)
    return ByValue(arg) if "__main__" in places else arg


@contextmanager
def main_not_imported() -> Iterator[None]:
    """Prevent children started in this context from importing the main program."""
    main: Any = sys.modules["__main__"]
    with _starting:
        spec, path = main.__spec__, vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if path is not None:
                main.__file__ = path


def is_guarded(source: str | bytes, line: int) -> bool:
    """Whether a line of a program is inside an `if` that tests `__name__`."""
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in ast.walk(ast.parse(source))
    )


def _launches_unguarded(path: str) -> bool:
    line = _line_of_main()
    if line is None:
        return False
    try:
        return not is_guarded(Path(path).read_bytes(), line)
    except (OSError, SyntaxError, ValueError):
        return False  # Without source, do as multiprocessing does.


def _line_of_main() -> int | None:
    """Return the line at the main program's top level that this call comes from."""
    main = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None
