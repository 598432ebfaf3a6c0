"""Memory for a state that is to come, made while nobody waits for it.

An optimizer that has not stepped has no state, and memory that is first touched while it is being
received costs more than the receiving (67 MB of AdamW's: 20 to 50 ms, 2026-11-21). A newcomer waits
for its place anyway. A twin of each optimizer, over one parameter of two numbers, tells how much
there will be; it also makes torch load what the first step needs. A wrong guess costs the memory
until the state has come, or the time that was to be saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

_log = logging.getLogger(__name__)
_OWN = "torch.optim."


def room_for(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return touched tensors like those that the optimizers will hold, where they hold none."""
    found = []
    for optimizer in optimizers:
        # Others' optimizers may do anything when they are made.
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
        make: Callable[..., torch.optim.Optimizer] = kind  # Its settings are its group's.
        twin = make([{"params": [probe], **settings}])
        twin.step()
    except (TypeError, ValueError, RuntimeError) as error:
        _log.debug("what a %s will hold is not known: %s", kind.__name__, error)
        return 0
    held = twin.state[probe].values()
    return sum(isinstance(each, torch.Tensor) and each.shape == probe.shape for each in held)
