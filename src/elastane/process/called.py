"""Functions pickled by value, for a process that calls them.

cloudpickle 3.1.3 replaces the file name of each code object by `<dynamic-code>`, so that equal
functions have equal pickles. The traceback of a worker would then show neither file nor line of the
user's function, so this module restores the file names. It fails as cloudpickle does.
"""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any


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
