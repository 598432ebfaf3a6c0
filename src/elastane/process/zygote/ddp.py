"""How a DistributedDataParallel dies in a worker: its reducer before its process group.

A race of torch's own (2.13), which early imports bring to light. A backward runs with a context of
Python's in its thread state, of which each collective has a share; gloo's thread frees the
collective, and the last share needs the interpreter's lock. DDP's reducer, where it is the last to
hold a group that was destroyed, waits in the group's destructor for that thread, with the lock: a
function that trains, destroys its group and returns hangs there. Seldom seen, for where DDP itself
is the first to import torch._dynamo, the default arguments of torch.distributed.nn.functional are
the group of that moment, and keep it for ever. The zygote has imported it before any group.

Only the group's own object gives the lock away while it dies. So it is made to die last. A subclass
with a `__del__` of its own that does not call its parent's is as it is without a launcher. Must
not import torch: where it is not preloaded there is nothing to do.
"""

from __future__ import annotations

import sys
from typing import Any


def free_reducers_first() -> None:
    """Have each DDP of this process, and of its forks, let go of its reducer before its group."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    ddp: Any = getattr(module, "DistributedDataParallel", None)
    if ddp is not None and not hasattr(ddp, "__del__"):
        ddp.__del__ = _free_reducer


def _free_reducer(self: Any) -> None:
    members = vars(self)
    for name in ("logger", "reducer"):  # the logger has a share in the reducer
        members.pop(name, None)
