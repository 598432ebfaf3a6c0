"""A function on its way to the workers, and their results, as files of one private folder.

cloudpickle takes along by value what is defined in `__main__`: a notebook's cells, a script. How it
fails: ConfigurationError that names the argument which cannot be pickled, or the rank without a
result.
"""

from __future__ import annotations

import functools
import json
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError
from elastane.process import called
from elastane.process.files import write_atomic
from elastane.worker.call import BEGUN, CALL, HEADER, VALUE, VALUES


@dataclass(frozen=True)
class FunctionCall:
    """The call that each worker makes; `macros`: `${local_rank}` in a str is replaced."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    macros: bool = False

    @property
    def name(self) -> str:
        """The function's name for messages."""
        return name_of(self.fn)


def name_of(fn: Any) -> str:
    """Return the name of a function, or of the function inside a partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__qualname__)).rpartition("<locals>.")[2]


def pack(call: FunctionCall) -> dict[str, bytes]:
    """Return the files that a worker needs, by name; ConfigurationError if pickling fails."""
    try:
        content = called.dumps((call.fn, list(call.args), dict(call.kwargs)))
    except Exception as error:
        raise _cannot_send(call, error, called.dumps) from error
    here = str(Path.cwd())
    header = {
        "name": call.name,
        "argv": sys.argv,
        "path": [entry or here for entry in sys.path],
        "sources": _sources(),
        "macros": call.macros,
    }
    return {HEADER: json.dumps(header, default=str).encode(), CALL: content}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files; ConfigurationError if there is no room."""
    for name, content in files.items():
        try:
            write_atomic(folder / name, content)
        except OSError as error:
            raise no_room(
                folder, f"the function and its arguments ({len(content)} bytes)", error
            ) from error


def no_room(folder: Path, what: str, error: OSError) -> ConfigurationError:
    """Return the error for a temporary folder that has no room for `what`."""
    return ConfigurationError(
        f"{what} cannot be left in {folder}: {error}",
        slug="function-folder",
        expected="room in the folder for temporary files of the machine",
        next_step="TMPDIR=/a/larger/folder for the program that launches",
    )


def collect(folder: Path, name: str, attempt: str) -> dict[int, Any]:
    """Return the results of this node's workers in an attempt (`ROUND.ATTEMPT`), by rank.

    Empty if this node had no workers. ConfigurationError if one ended without a result.
    """
    found = folder / VALUES / attempt
    ranks = sorted(int(path.name.removesuffix(BEGUN)) for path in found.glob(f"*{BEGUN}"))
    missing = [rank for rank in ranks if not (found / f"{rank}{VALUE}").exists()]
    if missing:
        raise ConfigurationError(
            f"{name}() did not return on rank {', '.join(map(str, missing))}: its process ended "
            "well, and left no value",
            slug="no-result",
            expected=f"{name}() returns, if only None, or raises",
            next_step="look for os._exit() in what it calls",
        )
    return {rank: load_value((found / f"{rank}{VALUE}").read_bytes(), name, rank) for rank in ranks}


def load_value(content: bytes, name: str, rank: int) -> Any:
    """Return the result of the function `name` on a rank, from its pickle."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise ConfigurationError(
            f"what {name}() returned on rank {rank} cannot be loaded here: "
            f"{type(error).__name__}: {error}",
            slug="unpicklable",
            expected="values whose modules can be imported in this program too",
        ) from error


def _cannot_send(
    call: FunctionCall, error: Exception, dumps: Callable[[Any], bytes]
) -> ConfigurationError:
    parts = {f"{call.name}() itself": call.fn}
    parts |= {f"argument {index} of {call.name}()": arg for index, arg in enumerate(call.args)}
    parts |= {f"argument {key} of {call.name}()": arg for key, arg in call.kwargs.items()}
    culprit = next((what for what, part in parts.items() if not _can_send(part, dumps)), "the call")
    return ConfigurationError(
        f"{culprit} cannot be sent to the workers: {type(error).__name__}: {error}",
        slug="unpicklable",
        expected="a function, and arguments, that can be pickled",
        next_step="make such objects (locks, sockets, queues, open files) inside the function",
    )


def _can_send(part: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True


def _sources() -> dict[str, str]:
    """Return the source of a notebook's cells, which no file holds, for tracebacks."""
    entries = {name: linecache.getlines(name) for name in list(linecache.cache) if _no_file(name)}
    return {name: "".join(lines) for name, lines in entries.items() if lines}


def _no_file(name: str) -> bool:
    return not name.startswith("<frozen ") and not Path(name).exists()
