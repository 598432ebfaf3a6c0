"""DistributedDataParallel over a group whose world changes.

DDP's reducer lays out its buckets twice: first by the order of the parameters, then, after one
backward, by the order in which gradients came. A joiner's new DDP has the first layout and a
survivor's the second, and a backward that was interrupted leaves a reducer half done. So every
member makes its reducer anew whenever the world changes, by what DDP itself does after unpickling.
Parameters, gradients, optimizer and compiled code are untouched.

Private names of DDP (2.13) are used here and nowhere else.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

_MODULE = DistributedDataParallel.__module__
# From a collective up to the DDP that asked for it there are four calls.
_FRAMES_MAX = 12


def asker(frame: FrameType | None, group: ProcessGroup) -> DistributedDataParallel | None:
    """The DDP over `group` on whose behalf `frame` runs, if it is one that runs there.

    Each DDP compares its parameters with the other members when it is made: then it is noticed.
    """
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _MODULE:
            module = frame.f_locals.get("self")
            if isinstance(module, DistributedDataParallel):
                same = module.__dict__.get("process_group") is group
                return module if same else None
        frame = frame.f_back
    return None


def renew(module: DistributedDataParallel) -> None:
    """Give `module` a reducer as if it had just been made, in the world as it now is."""
    ddp: Any = module
    if "reducer" not in ddp.__dict__:
        return  # its constructor did not come to an end, or it has no parameter to reduce
    # The old one first: it removes its hooks and frees its buckets.
    ddp.reducer = ddp.logger = None
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    ddp._has_rebuilt_buckets = False
    ddp._static_graph_delay_allreduce_enqueued = False
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]


def hush(module: DistributedDataParallel) -> None:
    """Let `module` reduce no gradients and broadcast no buffers: somebody else does."""
    module.require_backward_grad_sync = False
    module.require_forward_param_sync = False
