"""Allocates memory for a state that will arrive, before other members wait for it.

An optimizer that has not stepped has no state. Memory that is first touched while it is being
received costs more than the receiving: 20 to 50 ms for the 67 MB of AdamW (2026-11-21). A joining
worker waits for its place anyway. Stepping a copy of each optimizer over one parameter of two
numbers shows how much is needed. It also makes torch load what the first step needs. A wrong guess
wastes memory until the state has arrived, or saves no time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

_log = logging.getLogger(__name__)
_OWN = "torch.optim."


def room_for(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return touched tensors like those that optimizers without a state will hold."""
    found = []
    for optimizer in optimizers:
        # Constructing an optimizer that is not torch's may have side effects.
        if optimizer.state or not type(optimizer).__module__.startswith(_OWN):
            continue
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            count = _moments(type(optimizer), settings)
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.device.type == "cpu":
                    found += [torch.ones_like(parameter.detach()) for _ in range(count)]
    return found


def _moments(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> int:
    """Return how many tensors of a parameter's shape such an optimizer holds for it."""
    probe = torch.nn.Parameter(torch.ones(2))
    probe.grad = torch.ones(2)
    try:
        # The settings of a group are arguments of the constructor.
        make: Callable[..., torch.optim.Optimizer] = kind
        twin = make([{"params": [probe], **settings}])
        twin.step()
    except (TypeError, ValueError, RuntimeError) as error:
        _log.debug("the state of a %s cannot be predicted: %s", kind.__name__, error)
        return 0
    held = twin.state[probe].values()
    return sum(isinstance(each, torch.Tensor) and each.shape == probe.shape for each in held)
