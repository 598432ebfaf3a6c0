"""Counts how long this worker's main thread saves, evaluates and restores, on its status page.

The zygote has torch imported and wraps what a script calls: `torch.save`, `torch.load` until the
first step, and `Module.eval()`. The saves and loads of torch.distributed.checkpoint and safetensors
are wrapped once the script imports these packages.

An evaluation lasts from `Module.eval()` until the next step has ended, less the usual time of a
step. It counts only in a script whose steps are measured by its backward passes or its steps of
elastane, since nothing else says when the training continues. A part of a model that a script sets
to eval mode for training is no evaluation: less than EVALUATION_STEPS steps later the next step has
ended.

It never fails; without a page nothing is counted, and a fork of the worker counts nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from elastane.process.status_page import PauseWords, WorkerPage
from elastane.protocol.pauses import Pause

# An evaluation lasts at least this many times as long as the step before it.
EVALUATION_STEPS = 4
# Functions that save or load, by module: those that all public ones of the module call.
_DCP = "torch.distributed.checkpoint"
_SAVES: Mapping[str, tuple[str, ...]] = {
    "torch.serialization": ("_save", "_legacy_save"),
    f"{_DCP}.state_dict_saver": ("_save_state_dict",),
    "safetensors.torch": ("serialize_file",),
}
_LOADS: Mapping[str, tuple[str, ...]] = {
    "torch.serialization": ("_load", "_legacy_load"),
    f"{_DCP}.state_dict_loader": ("_load_state_dict",),
    "safetensors.torch": ("load_file",),
}


class PauseClock:
    """The pauses of one worker. An inner pause counts as its own kind, not as the outer one."""

    def __init__(self, words: PauseWords) -> None:
        self._words = words
        words.watch()
        self._thread = threading.main_thread().ident
        self._kind: Pause | None = None
        self._begun_ns = 0
        self._evaluated_ns = 0  # of this evaluation, before a save in it
        self._step_ns: int | None = None
        self._stepped_ns = 0

    @property
    def is_here(self) -> bool:
        """Whether this thread makes the steps."""
        return threading.get_ident() == self._thread

    def note_checkpoint(self, kind: Pause) -> None:
        """Note what this process does with checkpoints; in any thread."""
        self._words.note_checkpoint(written=kind is Pause.SAVING)

    @property
    def has_stepped(self) -> bool:
        """Whether a step was measured."""
        return bool(self._stepped_ns)

    def change(self, kind: Pause | None) -> Pause | None:
        """End the current pause and begin another one; return the kind that ended."""
        now_ns, before = time.monotonic_ns(), self._kind
        if before is not None:
            took_ns = now_ns - self._begun_ns
            if before is Pause.EVALUATING:
                self._evaluated_ns += took_ns  # Whether it is one is known at its end.
                took_ns = 0
            self._words.end(before, took_ns)
        self._kind, self._begun_ns = kind, now_ns
        if kind is not None:
            since_ns = now_ns
            if kind is Pause.EVALUATING:  # It shows once it is long enough to be one.
                since_ns += EVALUATION_STEPS * (self._step_ns or 0) - self._evaluated_ns
            self._words.begin(kind, since_ns)
        return before

    def evaluate(self) -> None:
        """Begin an evaluation, if steps are measured."""
        if self._kind is None and self.has_stepped:
            self.change(Pause.EVALUATING)

    def step(self) -> None:
        """End a step, and with it the evaluation before it."""
        now_ns = time.monotonic_ns()
        if self._kind is Pause.EVALUATING:
            self.change(None)
            step_ns = self._step_ns or 0
            evaluated_ns, self._evaluated_ns = self._evaluated_ns - step_ns, 0
            if evaluated_ns >= EVALUATION_STEPS * step_ns:
                self._words.end(Pause.EVALUATING, evaluated_ns)
        elif self.has_stepped:
            self._step_ns = now_ns - self._stepped_ns
        self._stepped_ns = now_ns


class _OwnClock:
    def __init__(self) -> None:
        self.clock: PauseClock | None = None

    def forget(self) -> None:
        """Count nothing in a forked child."""
        self.clock = None


_process = _OwnClock()
os.register_at_fork(after_in_child=_process.forget)


def begin(page: WorkerPage) -> None:
    """Count the pauses of this process on `page`."""
    _process.clock = PauseClock(page.pause_words())
    if not any(isinstance(finder, _LaterImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LaterImports())


def step_ended() -> None:
    """Note the end of a step of the main thread."""
    if _process.clock is not None:
        _process.clock.step()


@contextlib.contextmanager
def pausing(kind: Pause) -> Iterator[None]:
    """Count the time inside as a pause of this kind, if this is the main thread.

    In any thread it is noted whether this process reads or writes what may be a checkpoint.
    """
    clock = _process.clock
    if clock is not None:
        clock.note_checkpoint(kind)
    if clock is None or not clock.is_here:
        yield
        return
    before = clock.change(kind)
    try:
        yield
    finally:
        clock.change(before)


def watch_torch() -> None:
    """Count saves, loads and evaluations, here and in forks of this process; once is enough."""
    for name in {*_SAVES, *_LOADS} & sys.modules.keys():
        _watch_module(sys.modules[name])
    kind: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    if kind is not None and not hasattr(kind.eval, "__wrapped__"):
        kind.eval = _evaluating(kind.eval, sys.modules["torch"].compiler.is_compiling)


def _watch_module(module: ModuleType) -> None:
    """Count what the functions of one module that save or load take."""
    for names, around in ((_SAVES, _saving), (_LOADS, _loading)):
        for name in names.get(module.__name__, ()):
            call = getattr(module, name, None)
            if call is not None and not hasattr(call, "_elastane_pauses"):
                counted = around(call)
                # Not __wrapped__: the observer of a script's saves has that mark of its own.
                functools.update_wrapper(counted, call).__dict__.pop("__wrapped__")
                counted.__dict__["_elastane_pauses"] = True
                setattr(module, name, counted)


class _LaterImports:
    """A finder that leaves all work to the others, and wraps what a module saves by once it ran."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that another finder has for a module that saves or loads."""
        if name not in _SAVES and name not in _LOADS:
            return None
        for finder in sys.meta_path:
            look = getattr(finder, "find_spec", None)
            spec = look(name, path, target) if look is not None and finder is not self else None
            if spec is not None:
                loader: Any = spec.loader
                loader.exec_module = _executing(loader.exec_module)
                return cast(importlib.machinery.ModuleSpec, spec)
        return None


def _executing(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _watch_module(module)

    return exec_module


def _saving(call: Callable[..., Any]) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        with pausing(Pause.SAVING):
            return call(*args, **kwargs)

    return save


def _loading(call: Callable[..., Any]) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        clock = _process.clock
        if clock is None or clock.has_stepped:  # Later it is more likely data.
            return call(*args, **kwargs)
        with pausing(Pause.RESTORING):
            return call(*args, **kwargs)

    return load


def _evaluating(call: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(call)
    def eval(self: Any) -> Any:
        if not is_compiling():
            clock = _process.clock
            if clock is not None and clock.is_here:
                clock.evaluate()
        return call(self)

    return eval
