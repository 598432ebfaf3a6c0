"""A step that did not happen: what its half-run body had changed is put back.

What every step may change before it is sure is saved at its beginning: buffers, random streams,
small states, the optimizers' settings. Parameters are changed by an optimizer's step alone, which
comes when the step is sure; only where the body holds several optimizers may some have stepped and
others not, and only then are parameters copied, before each of those steps.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

import torch

from elastane.checkpoint.tracked import RandomStreams, Tracked, load_exactly
from elastane.job.buffers import Standing, standing


class Undo:
    """One job's; `begin` at each step's beginning, `restore` where it did not happen."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._streams: RandomStreams | None = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._buffers = _Buffers()
        self._small: list[tuple[Any, dict[str, Any]]] = []
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._updates: dict[int, _Update] = {}
        self.stepped: set[int] = set()

    def begin(self) -> None:
        """Save what this step may change."""
        tracked = self._tracked
        self._streams = RandomStreams()
        self._generators = [(g, g.get_state()) for g in tracked.generators]
        self._buffers.keep(tracked.modules)
        self._small = [(thing, dict(thing.state_dict())) for thing in tracked.others]
        self._settings = [
            (group, {key: value for key, value in group.items() if key != "params"})
            for optimizer in tracked.optimizers
            for group in optimizer.param_groups
        ]
        self._updates.clear()
        self.stepped.clear()

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Save what an optimizer is about to change, where another one may not get that far."""
        if self.has_copies and id(optimizer) not in self._updates:
            self._updates[id(optimizer)] = _Update(optimizer)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that an optimizer has stepped."""
        self.stepped.add(id(optimizer))

    @property
    def has_copies(self) -> bool:
        """Whether an update that has begun can be taken back."""
        return len(self._tracked.optimizers) > 1

    @property
    def is_whole(self) -> bool:
        """Whether every optimizer has stepped: the step has happened."""
        optimizers = {id(optimizer) for optimizer in self._tracked.optimizers}
        return bool(optimizers) and optimizers <= self.stepped

    def restore(self) -> None:
        """Put everything back as it was at the step's beginning."""
        for update in self._updates.values():
            update.restore()
        self._buffers.restore()
        for thing, state in self._small:
            thing.load_state_dict(state)
            if hasattr(thing, "_per_optimizer_states"):
                thing._per_optimizer_states.clear()  # A GradScaler's, that has unscaled already.
        for group, settings in self._settings:
            group.update(settings)
        for generator, kept in self._generators:
            generator.set_state(kept)
        for parameter in self._tracked.parameters():
            parameter.grad = None
        if self._streams is not None:
            self._streams.restore()


class _Update:
    """What one optimizer held before it stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = copy.deepcopy(optimizer.state_dict())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [(p, p.detach().clone()) for p in parameters]

    def restore(self) -> None:
        load_exactly(self._optimizer, self._state)
        with torch.no_grad():
            for live, kept in self._parameters:
                live.copy_(kept)


class _Buffers:
    """All buffers of some modules: where each stands, and what it held."""

    def __init__(self) -> None:
        self._standing: list[Standing] = []
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self, modules: Iterable[torch.nn.Module]) -> None:
        """Copy them all, into the memory of the last copies where these are the same tensors."""
        former = [each.tensor for each in self._standing]
        self._standing = standing(modules)
        live = [each.tensor for each in self._standing]
        if len(former) != len(live) or not all(map(operator.is_, former, live)):
            self._kept = [buffer.detach().clone() for buffer in live]
        elif live:
            torch._foreach_copy_(self._kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put each back where it stood, with what it held."""
        for each, kept in zip(self._standing, self._kept, strict=True):
            each.tensor.copy_(kept)
            each.put_back()
