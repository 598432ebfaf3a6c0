"""Pickles by value what another process cannot import, with the names of its files.

cloudpickle 3.1.3 replaces the file name of each code object by `<dynamic-code>`, so that equal
functions have equal pickles. A traceback of a worker would then show neither file nor line of the
user's function, so the names travel beside the code here. It fails as cloudpickle does.
"""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any


def dumps(thing: Any) -> bytes:
    """Return `thing` pickled, functions and classes of `__main__` by value."""
    buffer = io.BytesIO()
    _pickler()(buffer).dump(thing)
    return buffer.getvalue()


@functools.cache
def _pickler() -> Callable[[io.BytesIO], Any]:
    """Return cloudpickle's pickler with a reducer of code objects that keeps their file names."""
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
