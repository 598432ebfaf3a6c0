"""Observes the checkpoints that an unmodified script writes and reads.

`watch` wraps torch.save, and what torch.distributed.checkpoint.save and async_save call. A save
counts if it is surely one to resume from: it holds the state of an optimizer, goes to a file, and
was called by the main thread. A checkpoint may consist of several files, and be renamed after its
save, so it counts as whole only once training continues (`whole_at`). Other formats, saves of other
threads and object stores are not seen.

Loads by torch.load and torch.distributed.checkpoint.load are seen alike, until the first step: a
script that reads no state of an optimizer before it does not resume from a checkpoint.

A save that has begun is not cut off: SIGTERM waits for the main thread's, and a worker that ends
waits for those of its threads. An asynchronous save by all workers is refused. Otherwise nothing
about a save changes, and it never fails because it is watched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from elastane.comms.elastic import members_left
from elastane.worker import running_saves

_DCP_PACKAGE = "torch.distributed.checkpoint"
_DCP = f"{_DCP_PACKAGE}.state_dict_saver"
_DCP_LOADER = f"{_DCP_PACKAGE}.state_dict_loader"
# The functions that torch.distributed.checkpoint.async_save calls: the module, the class, and
# whether it saves by a process that has a process group of its own.
_ASYNC = (
    ("_async_thread_executor", "_ThreadBasedAsyncCheckpointExecutor", False),
    ("_async_process_executor", "_ProcessBasedAsyncCheckpointExecutor", True),
)
# A function of Lightning that writes to a file what it has saved to memory. Its package has four
# names.
_BY_MEMORY = ("utilities.cloud_io", "_atomic_save", "filepath")
# The place of no_dist among the arguments of `_save_state_dict`.
_NO_DIST_AT = 4
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


def _among_those_left() -> contextlib.AbstractContextManager[None]:
    """Return the context of a save that asks for rank and size itself."""
    return members_left(dist.group.WORLD if dist.is_initialized() else None)


class ScriptSaves:
    """The saves of this process; `refusal(what, expected)` makes the error of a refused one."""

    def __init__(self, refusal: Callable[[str, str], Exception]) -> None:
        self._refusal = refusal
        self._steps = 0
        self._last: SavedFile | None = None
        self._running = running_saves.of_process
        # Whether this process read the state of an optimizer before its first step.
        self.has_loaded = False

    def watch(self) -> None:
        """Observe all saves and loads from here on."""
        saver: Any = torch.serialization
        saver.load = torch.load = self._around_load(torch.load, lambda loaded, *_, **__: loaded)
        saver.save = torch.save = self._around(torch.save, _target_of_file, lambda *_, **__: True)
        self.watch_distributed()

    def watch_distributed(self) -> None:
        """Observe the saves and loads of torch.distributed.checkpoint, once it is imported."""
        loader: Any = sys.modules.get(_DCP_LOADER)
        load = getattr(loader, "_load_state_dict", None)
        if load is not None and not hasattr(load, "__wrapped__"):
            loader._load_state_dict = self._around_load(load, _filled)
        module: Any = sys.modules.get(_DCP)
        save = getattr(module, "_save_state_dict", None)
        if save is not None and not hasattr(save, "__wrapped__"):
            module._save_state_dict = self._around(
                save, _target_of_writer, _is_alone, _among_those_left
            )
        for name, kind, by_process in _ASYNC:
            executor: Any = getattr(sys.modules.get(f"{_DCP_PACKAGE}.{name}"), kind, None)
            begin = getattr(executor, "execute_save", None)
            if begin is not None and not hasattr(begin, "__wrapped__"):
                executor.execute_save = self._around_async(begin, by_process=by_process)

    @property
    def is_saving(self) -> bool:
        """Whether a save runs in any thread."""
        return self._running.any

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

    def _around_load(
        self, load: Callable[..., Any], found: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return `load`, which notes an optimizer in what `found(result, *args)` returns."""

        @functools.wraps(load)
        def loading(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            if not (self._steps or self.has_loaded):
                with contextlib.suppress(Exception):  # An object of the script may do anything.
                    self.has_loaded = holds_optimizer(found(loaded, *args, **kwargs))
            return loaded

        return loading

    def _around(
        self,
        save: Callable[..., Any],
        target: _Target,
        is_alone: Callable[..., bool],
        context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            alone = is_alone(*args, **kwargs)
            number = self._running.begin(alone=alone)
            try:
                # Without peers a save that needs them would hold the signal for ever.
                with running_saves.sigterm_held() if alone else contextlib.nullcontext():
                    with context():
                        result = save(*args, **kwargs)
                    self._note(frame, target, args, kwargs)
                    return result
            finally:
                self._running.end(number)

        return saving

    def _around_async(self, begin: Callable[..., Any], *, by_process: bool) -> Callable[..., Any]:
        @functools.wraps(begin)
        def beginning(*args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized() and (by_process or not _is_alone(*args, **kwargs)):
                what = "torch.distributed.checkpoint.async_save()" + " by a process" * by_process
                expected = "save(), or async_save(no_dist=True) by a thread, on one rank or each"
                raise self._refusal(what, expected)
            # The thread that will save is not there yet, so it is none that could wait for itself.
            number = self._running.begin(alone=True, thread=0)
            try:
                future: Future[Any] = begin(*args, **kwargs)
            except BaseException:
                self._running.end(number)
                raise
            future.add_done_callback(lambda done: self._end_async(number, done, args, kwargs))
            return future

        return beginning

    def _end_async(self, number: int, done: Future[Any], args: Any, kwargs: Any) -> None:
        """In the thread of an asynchronous save: note it as one of the main thread, which began it.

        The save counts before it has ended, so that no worker parks between the two.
        """
        try:
            if not done.cancelled() and done.exception() is None:
                self._keep(_target_of_staged, args, kwargs)
        finally:
            self._running.end(number)

    def _note(self, frame: FrameType, target: _Target, args: Any, kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._keep(functools.partial(target, frame), args, kwargs)

    def _keep(self, target: _Target, args: Any, kwargs: Any) -> None:
        try:
            state, where, file = target(*args, **kwargs)
            if where and holds_optimizer(state):
                self._last = SavedFile(where, self._steps, file)
        except Exception:
            return  # An object of the script may do anything, and its save is done.


_Target = Callable[..., tuple[Any, str, Any]]


def _filled(_loaded: Any, state_dict: Any, *_: Any, **__: Any) -> Any:
    """Return the state that torch.distributed.checkpoint has loaded into."""
    return state_dict


def _target_of_file(frame: FrameType, obj: Any, f: Any, *_: Any, **__: Any) -> tuple[Any, str, Any]:
    """Return the saved object, its path, and the script's file object."""
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


def _target_of_staged(
    _executor: Any,
    staged: Any,
    *_: Any,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    **__: Any,
) -> tuple[Any, str, Any]:
    """Return the object and the path of an asynchronous save; `staged` may be a future of torch."""
    state = staged.result() if isinstance(staged, Future) else staged
    path = checkpoint_id or getattr(storage_writer, "path", None)
    return state, str(path or type(storage_writer).__name__), None


def _is_alone(*args: Any, no_dist: bool = False, use_collectives: bool = True, **_: Any) -> bool:
    """Whether a save of torch.distributed.checkpoint needs no other worker."""
    no_dist = no_dist or (len(args) > _NO_DIST_AT and bool(args[_NO_DIST_AT]))
    return no_dist or not use_collectives or not dist.is_initialized()


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
