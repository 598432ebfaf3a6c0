"""Sees the checkpoints that a script writes which knows nothing of elastane.

`watch` puts itself around torch.save and what torch.distributed.checkpoint.save calls. A save
counts if it is surely one to resume from: it holds the state of an optimizer, goes to a file, and
was called by the main thread. A checkpoint may consist of several files, and be renamed after its
save; so it is whole only once training goes on, which `whole_at` is asked for. What cannot be seen
is not guessed: other formats, saves of other threads, object stores. Never fails, and changes
nothing about a save.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

_DCP = "torch.distributed.checkpoint.state_dict_saver"
# A function of Lightning that writes to a file what it has saved to memory. Its package has four
# names.
_BY_MEMORY = ("utilities.cloud_io", "_atomic_save", "filepath")
# How many values of a saved object are looked at.
_VALUES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A save that has returned: where to, and after how many steps of training.

    `file`: the file object, if the script opened it.
    """

    where: str
    steps: int
    file: Any = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing of it is left in a buffer of this process."""
        return self.file is None or bool(self.file.closed)


class ScriptSaves:
    """The saves of this process."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: SavedFile | None = None
        self._lock = threading.Lock()
        self._running = 0

    def watch(self) -> None:
        """See what is saved from here on."""
        saver: Any = torch.serialization
        saver.save = torch.save = self._around(torch.save, _target_of_file)
        self.watch_distributed()

    def watch_distributed(self) -> None:
        """See saves by torch.distributed.checkpoint too, once it is imported."""
        module: Any = sys.modules.get(_DCP)
        save = getattr(module, "_save_state_dict", None)
        if save is not None and not hasattr(save, "__wrapped__"):
            module._save_state_dict = self._around(save, _target_of_writer)

    @property
    def is_saving(self) -> bool:
        """Whether a save runs in any thread."""
        return self._running > 0

    def whole_at(self, steps: int) -> str | None:
        """Return a checkpoint that is whole now that `steps` steps are made, once; or None.

        All workers take part in a step, so all have returned from what they saved before it.
        """
        self._steps = steps
        saved = self._last
        if saved is None or steps <= saved.steps or self.is_saving:
            return None
        self._last = None
        return saved.where if saved.is_closed else None

    def _around(self, save: Callable[..., Any], target: _Target) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            with self._lock:
                self._running += 1
            try:
                result = save(*args, **kwargs)
                self._note(frame, target, args, kwargs)
                return result
            finally:
                with self._lock:
                    self._running -= 1

        return saving

    def _note(self, frame: FrameType, target: _Target, args: Any, kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            state, where, file = target(frame, *args, **kwargs)
            if where and holds_optimizer(state):
                self._last = SavedFile(where, self._steps, file)
        except Exception:
            return  # An object of the script may do anything, and its save is done.


_Target = Callable[..., tuple[Any, str, Any]]


def _target_of_file(frame: FrameType, obj: Any, f: Any, *_: Any, **__: Any) -> tuple[Any, str, Any]:
    """Return what torch.save was given, the path it went to, and the script's file object."""
    if isinstance(f, str | os.PathLike):
        return obj, os.fspath(f), None
    module, function, local = _BY_MEMORY
    if frame.f_code.co_name == function and frame.f_globals["__name__"].endswith(f".{module}"):
        return obj, str(frame.f_locals[local]), None
    is_file = stat.S_ISREG(os.fstat(f.fileno()).st_mode)
    return obj, str(getattr(f, "name", "")) if is_file else "", f


def _target_of_writer(
    _frame: FrameType, state_dict: Any, storage_writer: Any, *_: Any, **__: Any
) -> tuple[Any, str, Any]:
    where = getattr(storage_writer, "path", None) or type(storage_writer).__name__
    return state_dict, str(where), None


def holds_optimizer(state: Any) -> bool:
    """Whether an object holds an optimizer or its state dict; it may be nested in containers."""
    values, seen = deque([state]), 0
    while values and seen < _VALUES_MAX:
        value = values.popleft()
        seen += 1
        if isinstance(value, torch.optim.Optimizer):
            return True
        if isinstance(value, Mapping):
            if {"state", "param_groups"} <= value.keys():
                return True
            values.extend(list(value.values())[: _VALUES_MAX - len(values)])
        elif isinstance(value, list | tuple):
            values.extend(value[: _VALUES_MAX - len(values)])
    return False
