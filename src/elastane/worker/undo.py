"""Undo a step that failed: restore everything that its partly run body had changed.

Everything that any step may change is saved at its beginning: buffers, random streams, small
states, the optimizers' settings. Parameters are copied only if they may have changed when a step
fails. That is before each update if there are several optimizers, and before an update that runs
the body itself (a closure). Once a body was seen to change parameters by itself, it is at the
beginning of each step. If something changed that was not copied, `restore` returns False, and the
member receives the state from another.

Of a sharded state (`follow`), it also knows what a step changes of the parameters without an
optimizer, and where: no other member can make such a change for this one.

A body may change a buffer in place, as BatchNorm does, or assign a new tensor, as in `self.average
= 0.9 * self.average + x`. To restore a buffer, its module and name are needed as well as its tensor
(`BufferStatus`).
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from elastane.checkpoint.registered import (
    RandomStreams,
    RegisteredObjects,
    is_dtensor,
    load_exactly,
)
from elastane.checkpoint.samples import Sample, Samples, is_plain
from elastane.worker.shard_plan import OwnChanges

# A GradScaler sets them during a fused optimizer's step. If that raises they stay set, and the next
# step would divide by the product of both scales.
_SCALED = ("grad_scale", "found_inf")
_PLAIN = (int, float, bool, str, type(None))


class Undo:
    """The saved state of the current step; `begin` at its beginning, `restore` if it failed."""

    def __init__(self, tracked: RegisteredObjects) -> None:
        self._tracked = tracked
        self._streams: RandomStreams | None = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._buffers = _Buffers()
        self._parameters = _Parameters()
        self._small: list[tuple[Any, dict[str, Any]]] = []
        self._settings: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._updates: dict[int, _Update] = {}
        # Optimizers, by id: steps called, updates in progress, and those with several steps in one
        # body.
        self._called: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()
        self._repeating: set[int] = set()
        # Whether an update can neither be undone nor count as the whole step.
        self._is_torn = False
        self.stepped: set[int] = set()
        self._follows = False
        self._is_committed = False
        self._own_changes = OwnChanges.NONE
        self._was_changed_early = False

    def follow(self) -> None:
        """Follow what steps change without an optimizer, from the next one on."""
        self._follows = True

    def begin(self) -> None:
        """Save what this step may change."""
        tracked = self._tracked
        self._own_changes = self.own_changes
        self._is_committed = self._was_changed_early = False
        self._streams = RandomStreams()
        self._generators = [(g, g.get_state()) for g in tracked.generators]
        self._buffers.keep(tracked.modules)
        self._parameters.keep(tracked)
        self._small = [(thing, _copied(thing.state_dict())) for thing in tracked.others]
        self._settings = [
            (optimizer, [_settings_of(group) for group in optimizer.param_groups])
            for optimizer in tracked.optimizers
        ]
        self._updates.clear()
        self._called.clear()
        self._inside.clear()
        self._is_torn = False
        self.stepped.clear()

    def called(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer's step was called, whether or not it succeeds."""
        number = id(optimizer)
        self._called[number] += 1
        if number in self.stepped and self._called[number] == 1:
            self._repeating.add(number)
            self._is_torn |= number not in self._updates

    def before_update(self, optimizer: torch.optim.Optimizer, *, runs_body: bool = False) -> None:
        """Save what an optimizer is about to change, if the body may fail after that.

        `runs_body`: it changes parameters, and then runs part of the body by its closure.
        """
        number = id(optimizer)
        if self._follows:
            self._was_changed_early |= self._parameters.is_changed_lately()
        if self._was_changed_early or (not self.stepped and not self._inside.total()):
            self._parameters.copy_if_changed()
        copies = runs_body or self.has_copies or number in self._repeating
        if copies and number not in self._updates and number not in self.stepped:
            self._updates[number] = _Update(optimizer)
        self._inside[number] += 1

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped."""
        self._called[id(optimizer)] -= 1
        self._inside[id(optimizer)] -= 1
        self.stepped.add(id(optimizer))
        if self._follows:
            self._parameters.look()

    def committed(self) -> None:
        """Record that the step was committed."""
        if not self.stepped:
            self._parameters.copy_if_changed()
        if self._follows:
            self._is_committed, self._own_changes = True, OwnChanges.NONE
            if self._parameters.is_changed_lately():
                self._own_changes = OwnChanges.INSIDE

    @property
    def own_changes(self) -> OwnChanges:
        """What the last committed step changed after its update."""
        is_asked = self._is_committed and self._own_changes is OwnChanges.NONE
        if is_asked and self._parameters.is_changed_lately():
            return OwnChanges.OUTSIDE
        return self._own_changes

    def received(self) -> None:
        """Record that the state is another member's, which may have made changes of its own."""
        self._is_committed, self._own_changes = False, OwnChanges.INSIDE

    def healed(self) -> None:
        """Record that all members hold one state: the last step is of no further interest."""
        self._is_committed, self._own_changes = False, OwnChanges.NONE

    @property
    def is_stuck(self) -> bool:
        """Whether the step cannot be undone, as far as that is known before `restore`."""
        was_changed = self._was_changed_early or self._parameters.is_changed_lately()
        return not self.is_revocable or (was_changed and not self._parameters.has_copies)

    @property
    def has_copies(self) -> bool:
        """Whether an update that has begun can be undone."""
        return len(self._tracked.optimizers) > 1

    @property
    def is_whole(self) -> bool:
        """Whether every optimizer has stepped, and each step that was called has ended."""
        optimizers = {id(optimizer) for optimizer in self._tracked.optimizers}
        is_over = not self._is_torn and not self._called.total()
        return bool(optimizers) and optimizers <= self.stepped and is_over

    @property
    def is_revocable(self) -> bool:
        """Whether every update that was made or begun can be undone."""
        made = self.stepped | set(+self._inside)
        return not self._is_torn and made <= self._updates.keys()

    def restore(self) -> bool:
        """Restore the state of the step's beginning; return whether all of it was restored."""
        is_revocable = self.is_revocable
        # In reverse order: an optimizer inside another is restored before the outer one.
        for update in reversed(self._updates.values()):
            update.restore()
        self._parameters.restore()
        self._buffers.restore()
        for thing, state in self._small:
            thing.load_state_dict(state)
            if hasattr(thing, "_per_optimizer_states"):
                # A GradScaler that has unscaled would refuse the retry.
                thing._per_optimizer_states.clear()
        for optimizer, groups in self._settings:
            for name in _SCALED:
                vars(optimizer).pop(name, None)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for generator, kept in self._generators:
            generator.set_state(kept)
        for parameter in self._tracked.parameters():
            parameter.grad = None
        if self._streams is not None:
            self._streams.restore()
        self._called.clear()
        self._inside.clear()
        return is_revocable and not self._parameters.is_changed()


def _copied(state: Any) -> Any:
    """Return a copy of a small state, which may hold an object's own lists and tensors."""
    if type(state) in _PLAIN:
        return state
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if type(state) is dict:
        return {key: _copied(each) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return copy.deepcopy(state)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class _Update:
    """The state and parameters of one optimizer before its update."""

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


class _Parameters:
    """The parameters at a step's beginning: two numbers of each, and copies if those are needed.

    `copy_if_changed` decides whether later steps copy all parameters.
    """

    def __init__(self) -> None:
        self._live: list[torch.Tensor] = []
        self._count = -1
        self._samples = Samples()
        self._sampled: Sample = (b"", [])
        self._lately: Sample = self._sampled
        self._is_copied = False
        self._kept: list[torch.Tensor] = []

    def keep(self, tracked: RegisteredObjects) -> None:
        """Sample the parameters, and copy them if that is needed."""
        count = 0
        for optimizer in tracked.optimizers:
            for group in optimizer.param_groups:
                count += len(group["params"])
        if count != self._count:
            self._count = count
            self._live = _live_parts(tracked)
            self._kept = []
        self._samples.follow(self._live)
        self._sampled = self._lately = self._samples.take()
        if self._is_copied and self._live:
            self._copy()

    @property
    def has_copies(self) -> bool:
        """Whether their values at the step's beginning are kept."""
        return bool(self._kept)

    @torch.no_grad()
    def _copy(self) -> None:
        if self._kept:
            torch._foreach_copy_(self._kept, self._live)
        else:
            self._kept = [each.detach().clone() for each in self._live]

    def copy_if_changed(self) -> None:
        """Copy them from the next step on, if a body has changed them without an optimizer."""
        if not self._is_copied:
            self._is_copied = self.is_changed()

    def is_changed(self) -> bool:
        """Whether they differ from the step's beginning."""
        return self._samples.differ(self._sampled)

    def look(self) -> None:
        """Sample them for `is_changed_lately`."""
        self._lately = self._samples.take()

    def is_changed_lately(self) -> bool:
        """Whether they differ from the last `look`, or from the step's beginning if it is later."""
        return self._samples.differ(self._lately)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied values."""
        if self._kept:
            places = self._samples.places
            for live, place, kept in zip(self._live, places, self._kept, strict=True):
                if live.data_ptr() != place:
                    live.data = kept.clone()
                else:
                    live.copy_(kept)
            self._samples.follow(self._live)


def _live_parts(tracked: RegisteredObjects) -> list[torch.Tensor]:
    """Return the memory of the parameters: of a sharded one, the part that this worker holds.

    A sharded module that keeps whole parameters after a forward shows those, in memory that it
    frees later. So it is resharded first.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in tracked.modules if fsdp is not None else ():
        for each in module.modules():
            if isinstance(each, fsdp.FSDPModule):
                each.reshard()
    parameters: Iterator[Any] = tracked.parameters()
    with torch.no_grad():
        parts = [each.to_local() if is_dtensor(each) else each for each in parameters]
    return [each for each in parts if is_plain(each)]


class _Buffers:
    """All buffers of some modules: where each is registered, and its value."""

    def __init__(self) -> None:
        self._registered: list[BufferStatus] = []
        self._kept: list[torch.Tensor] = []

    def keep(self, modules: Iterable[torch.nn.Module]) -> None:
        """Copy them all, into the memory of the last copies if the tensors are the same."""
        former = [each.tensor for each in self._registered]
        self._registered = buffers_of(modules)
        if self._registered or former:
            self._copy(former)

    @torch.no_grad()
    def _copy(self, former: list[torch.Tensor]) -> None:
        live = [each.tensor for each in self._registered]
        if len(former) != len(live) or not all(map(operator.is_, former, live)):
            self._kept = [buffer.detach().clone() for buffer in live]
        elif live:
            torch._foreach_copy_(self._kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Register each buffer again, with its value."""
        for each, kept in zip(self._registered, self._kept, strict=True):
            each.tensor.copy_(kept)
            each.put_back()


class BufferStatus(NamedTuple):
    """One buffer: its tensor, and the module and name that it is registered under."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor that is registered under that name now."""
        return self.module._buffers.get(self.name)

    def put_back(self) -> None:
        """Register the original tensor again."""
        self.module._buffers[self.name] = self.tensor


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[BufferStatus]:
    """Return all buffers of the modules and their submodules.

    A buffer that is registered twice is returned twice. It runs at each step: it is four times as
    fast as `Module.modules()` (torch 2.13).
    """
    seen: set[int] = set()
    pending: list[torch.nn.Module | None] = [*modules]
    found: list[BufferStatus] = []
    while pending:
        module = pending.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        pending.extend(module._modules.values())
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.append(BufferStatus(module, name, buffer))
    return found
