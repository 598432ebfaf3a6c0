"""State dicts of modules and optimizers that are rebuilt only if their contents were replaced.

torch builds each from scratch. For a save after every step that is most of the time that the loop
is blocked: a millisecond for some hundred tensors. This module instead checks, at the speed of C,
that the same objects are there under the same names. When it builds a state dict it checks that
nothing else went into it. If hooks or a subclass add something, it is built each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.nn import Module

_VALUES = methodcaller("values")
_OWN = attrgetter(
    *("_parameters", "_buffers", "_modules"),
    *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
)
_METHODS = attrgetter("state_dict", "_save_to_state_dict", "get_extra_state")
_OPTIMIZER_HOOKS = attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class ModuleState:
    """The state dict of a module, with its parameters: new tensors would take 4 times as long."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._state: dict[str, Any] | None = None
        self._modules: list[Module] = []
        # The mappings of all modules: six of each module.
        self._own: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        self._sets: list[set[str]] = []
        # Their contents.
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._unsaved: list[set[str]] = []

    def __call__(self) -> dict[str, Any]:
        """Return the state dict."""
        if self._state is None or not self._is_same():
            self._state = None
            state = self._module.state_dict(keep_vars=True)
            self._record()
            if _are_same(self._saved(), state.values()):
                self._state = state
            return state
        return self._state

    def _record(self) -> None:
        self._modules = [*self._module.modules()]
        self._own = [*chain.from_iterable(map(_OWN, self._modules))]
        self._dicts = [each for n in range(3) for each in self._own[n::6]]
        self._sets = self._own[3::6]
        self._hooks = [each for n in (4, 5) for each in self._own[n::6]]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(_VALUES, self._dicts))]
        self._unsaved = [{*names} for names in self._sets]

    def _is_same(self) -> bool:
        return (
            _are_same(chain.from_iterable(map(_OWN, self._modules)), self._own)
            and _are_same(chain.from_iterable(map(_VALUES, self._dicts)), self._values)
            and [*chain.from_iterable(self._dicts)] == self._keys
            and self._sets == self._unsaved
            and not any(self._hooks)
        )

    def _saved(self) -> Iterable[Any]:
        """Yield a standard state dict's contents; for other modules something that cannot match."""
        for module in self._modules:
            kind = type(module)
            if _METHODS(kind) != _METHODS(Module) or any(_OWN(module)[4:]):
                yield module
            yield from filter(_is_there, module._parameters.values())
            for name, buffer in module._buffers.items():
                if name not in module._non_persistent_buffers_set and buffer is not None:
                    yield buffer


class OptimizerState:
    """The state dict of an optimizer, with the states of its parameters, as torch returns it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._packed: dict[Any, Any] | None = None
        self._states: list[Any] = []
        self._parameters: list[list[Any]] = []
        self._numbers: list[list[int]] = []

    def __call__(self) -> dict[str, Any]:
        """Return the state dict."""
        if self._packed is not None and self._is_same():
            return {"state": self._packed, "param_groups": self._groups()}
        state = self._optimizer.state_dict()
        self._packed = None
        if not any(_OPTIMIZER_HOOKS(self._optimizer)) and [*state] == ["state", "param_groups"]:
            groups = self._optimizer.param_groups
            self._states = [*chain(self._optimizer.state, self._optimizer.state.values())]
            self._parameters = [[*group["params"]] for group in groups]
            self._numbers = [group["params"] for group in state["param_groups"]]
            own = [*self._optimizer.state.values()]
            if _are_same(state["state"].values(), own) and _are_alike(
                self._groups(), state["param_groups"]
            ):
                self._packed = state["state"]
        return state

    def _is_same(self) -> bool:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        return (
            _are_same(chain(optimizer.state, optimizer.state.values()), self._states)
            and len(groups) == len(self._parameters)
            and all(
                _are_same(group["params"], own)
                for group, own in zip(groups, self._parameters, strict=True)
            )
            and not any(_OPTIMIZER_HOOKS(optimizer))
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups with their current options, and their parameters by number."""
        return [
            {**{key: each for key, each in group.items() if key != "params"}, "params": numbers}
            for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=True)
        ]


def _are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether both are the same objects in the same order."""
    found, known = [*one], [*other]
    return len(found) == len(known) and all(map(is_, found, known))


def _are_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether the mappings have the same keys in the same order, with the same objects."""
    return len(one) == len(other) and all(
        [*own] == [*his] and _are_same(own.values(), his.values())
        for own, his in zip(one, other, strict=True)
    )


def _is_there(value: Any) -> bool:
    return value is not None
