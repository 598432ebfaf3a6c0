"""The reads of RANK and WORLD_SIZE by which a script asks for its place in the world.

Many scripts ask the environment and not torch.distributed; both change together. `watch` gives an
environment a class that calls a function at each such read. What reads the whole environment, such
as a copy for a subprocess, or only tests whether a variable is there, asks for nothing. Where the
two cannot be told apart, a question is missed, as if the script had asked less often. Fails as the
read does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from elastane.synchrony.rank_reads import is_of_script

# Between a script and the mapping: os.getenv() and the methods of the abstract mapping.
_READERS = frozenset(("os", "collections.abc", "_collections_abc"))


class _Listed(threading.local):
    """The names that a thread has listed and not read yet, the next one last."""

    def __init__(self) -> None:
        self.names: list[str] = []


_listed = _Listed()
_asked: dict[object, Callable[[], None]] = {}


class _WatchedEnviron(os._Environ[str]):
    """The environment, with a call at each read of a watched variable by the script."""

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key)
        if key in _asked and not self._is_listed(key) and _asks():
            _asked[key]()
        return value

    def __iter__(self) -> Iterator[str]:
        names = [*super().__iter__()]
        _listed.names = names[::-1]
        return iter(names)

    def _is_listed(self, key: str) -> bool:
        """Whether this read is one of all variables, as `dict(os.environ)` makes them in order."""
        names = _listed.names
        while names:
            if names.pop() == key:
                return True
        return False


def watch(asked: Mapping[str, Callable[[], None]], environ: os._Environ[str] = os.environ) -> None:
    """Call the function of a variable in `asked` whenever the script reads it from `environ`."""
    _asked.update(asked)
    environ.__class__ = _WatchedEnviron


def _asks() -> bool:
    """Whether the script reads a value; the caller's caller is the read."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _READERS:
        if frame.f_code.co_name == "__contains__":
            return False
        frame = frame.f_back
    return is_of_script(frame)
