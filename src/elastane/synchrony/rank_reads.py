"""The questions of a script for its rank and world size, and whether they come often enough.

A program that keeps its rank in a variable saves and logs on no worker once rank 0 is lost, and
ends well all the same. Only its questions are seen: it has asked none since the loss, for longer
than it ever went without one.

Many scripts ask RANK and WORLD_SIZE of the environment and not torch.distributed; both change
together. `watch_variables` gives an environment a class that calls a function at each such read.
What reads the whole environment, such as a copy for a subprocess, or only tests whether a variable
is there, asks for nothing. Where the two cannot be told apart, a question is missed, as if the
script had asked less often. Fails as the read does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

# A program that has never asked in its steps has this many to do so; one that has asked has more.
STEPS_MIN = 100
# What lies between a question of the script and the group.
_TORCHS = frozenset(("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"))
# Between a script and the mapping: os.getenv() and the methods of the abstract mapping.
_READERS = frozenset(("os", "collections.abc", "_collections_abc"))
# Packages that ask for the world size to divide sums of their own.
_FRAMEWORKS = ("accelerate.", "lightning.fabric.", "lightning_fabric.", "torchmetrics.")
# Their properties for the size, by which a script asks.
_SIZES = ("num_processes", "world_size")


class RankReads:
    """The questions of a program for its rank, by the number of the step in which they came."""

    def __init__(self) -> None:
        self._asked_at = self._longest = 0
        # The step in which rank 0 was lost; None if the program has asked since, or was warned of.
        self._lost_at: int | None = None

    def asked(self, steps: int) -> None:
        """Record a question, after `steps` steps."""
        self._longest = max(self._longest, steps - self._asked_at)
        self._asked_at = steps
        self._lost_at = None

    def first_lost(self, steps: int) -> None:
        """Record that the worker of rank 0 was lost, after `steps` steps."""
        self._lost_at = steps

    def warning(self, steps: int, *, ends: bool = False) -> str:
        """Return what to warn of, once for each loss; "" if nothing is.

        `ends`: the program has ended, so it will not ask.
        """
        lost_at = self._lost_at
        allowed = 0 if ends else STEPS_MIN + 2 * self._longest
        if lost_at is None or steps - lost_at < allowed:
            return ""
        self._lost_at = None
        return (
            f"the worker of rank 0 was lost {steps - lost_at} steps ago, and the script has not"
            " asked for its rank since. If it keeps the rank in a variable, no"
            " worker saves or logs in its place. Next step: then start it without"
            " --ranks-may-change"
        )


def is_of_script(frame: FrameType | None) -> bool:
    """Whether the script asked, not torch or this package; `frame` called the group's method."""
    while frame is not None and _module(frame) in _TORCHS:
        frame = frame.f_back
    return frame is not None and not _module(frame).startswith(("torch.", "elastane."))


def is_of_framework(frame: FrameType | None) -> bool:
    """Whether a framework asks for itself, and not for the script by its own property."""
    while frame is not None and (
        _module(frame).startswith(("torch.", "elastane."))
        or _module(frame) in _READERS
        or (_module(frame).startswith(_FRAMEWORKS) and frame.f_code.co_name in _SIZES)
    ):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_FRAMEWORKS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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


def watch_variables(
    asked: Mapping[str, Callable[[], None]], environ: os._Environ[str] = os.environ
) -> None:
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
