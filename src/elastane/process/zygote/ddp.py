"""Frees a DistributedDataParallel's reducer before its process group, to avoid a hang of torch.

This is a race in torch itself (2.13), which early imports expose. A backward pass puts a Python
context into its thread state, and each collective shares it. gloo's thread frees the collective,
and freeing the last share needs the interpreter's lock. If DDP's reducer is the last holder of a
destroyed group, it waits with that lock, in the group's destructor, for that thread. So a function
that trains, destroys its group and returns hangs there.

The hang is rare without a zygote. If DDP itself is the first to import torch._dynamo, the default
arguments of torch.distributed.nn.functional hold the present group for ever. The zygote has
imported it before any group exists.

Only the group's own object releases the lock while it is destroyed, so this module makes it die
last. A subclass with a `__del__` of its own that does not call its parent's behaves as without a
launcher. This module must not import torch: if torch is not preloaded there is nothing to do.
"""

from __future__ import annotations

import sys
from typing import Any


def free_reducers_first() -> None:
    """Make each DDP of this process, and of its forks, free its reducer before its group."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    ddp: Any = getattr(module, "DistributedDataParallel", None)
    if ddp is not None and not hasattr(ddp, "__del__"):
        ddp.__del__ = _free_reducer


def _free_reducer(self: Any) -> None:
    members = vars(self)
    for name in ("logger", "reducer"):  # the logger shares the reducer
        members.pop(name, None)
