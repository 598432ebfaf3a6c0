"""Copies of a model's weights that users' callbacks hold, such as moving averages.

A worker that joins has a copy of its own, of weights that it began with. If the owner of the copy
does not save it, nothing can hand it over, and the averages of workers would differ. `weight_copy`
finds such copies by their shapes; it looks into containers and objects of the owner, three deep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DEPTH_MAX = 3


def weight_copy(attributes: Iterable[tuple[str, Any]], model: torch.nn.Module) -> str | None:
    """Return the name of the attribute with a copy of all weights that are trained, or None."""
    for name, value in attributes:
        held = [*_tensors(value, _DEPTH_MAX)]
        if held and _are_copies(held, model):
            return name
    return None


def _are_copies(tensors: list[torch.Tensor], model: torch.nn.Module) -> bool:
    own = {id(each) for each in model.parameters()}
    trained = [each for each in model.parameters() if each.requires_grad]
    others = [each for each in tensors if id(each) not in own]
    return bool(trained) and not _shapes(trained) - _shapes(others)


def _shapes(tensors: Iterable[torch.Tensor]) -> Counter[torch.Size]:
    return Counter(each.shape for each in tensors)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the floating tensors of a value."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif depth:
        for each in _parts(value, is_whole=depth == _DEPTH_MAX):
            yield from _tensors(each, depth - 1)


def _parts(value: Any, is_whole: bool) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if is_whole and hasattr(value, "__dict__") else ()
