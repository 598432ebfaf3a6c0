"""The steps of optimizers that a thread of the program is in.

An optimizer that communicates within its step may update a part of the parameters on each worker,
and keep the state of that part there alone, as ZeRO, Muon and distributed Shampoo do. So the group
asks in which optimizer's step it was called. Raises nothing: a step that failed is dropped once its
optimizer steps again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastane.comms.untraced import untraced


class _Running(threading.local):
    """The optimizers whose steps a thread is in, the outermost first."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []


class OptimizerSteps:
    """Follows the steps of all optimizers of this process.

    `made` is called after each, and `begins` before each.
    """

    def __init__(self, made: Callable[[], None], begins: Callable[[], None] = lambda: None) -> None:
        self._made = made
        self._begins = begins
        self._running = _Running()

    def watch(self) -> None:
        """Follow each step that begins from here on."""
        register_optimizer_step_pre_hook(self.begin)
        register_optimizer_step_post_hook(self.end)

    @property
    def running(self) -> str:
        """The class of the outermost optimizer in whose step this thread is; "" outside of one."""
        optimizers = self._running.optimizers
        return type(optimizers[0]).__name__ if optimizers else ""

    @untraced
    def begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a step; return other arguments for it if one is a closure, which runs outside."""
        self._begins()
        self._drop(optimizer)
        self._running.optimizers.append(optimizer)
        own, *others = args
        if not any(map(callable, (*others, *kwargs.values()))):
            return None
        named = {name: self._outside(value) for name, value in kwargs.items()}
        return (own, *map(self._outside, others)), named

    @untraced
    def end(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """End a step."""
        self._drop(optimizer)
        self._made()

    def _drop(self, optimizer: Optimizer) -> None:
        """Leave the step of an optimizer, and those within it."""
        running = self._running.optimizers
        for place, each in enumerate(running):
            if each is optimizer:
                del running[place:]
                return

    def _outside(self, argument: Any) -> Any:
        """Return an argument of a step; if it is a closure, one that runs outside of all steps."""
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            inner, self._running.optimizers = self._running.optimizers, []
            try:
                return argument(*args, **kwargs)
            finally:
                self._running.optimizers = inner

        return closure
