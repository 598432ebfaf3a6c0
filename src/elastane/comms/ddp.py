"""DistributedDataParallel over a group whose world changes.

DDP's reducer lays out its buckets twice: first in the order of the parameters, then, after one
backward, in the order in which gradients arrived. The new DDP of a joining worker has the first
layout and that of a survivor the second. A backward that was interrupted leaves a half-used
reducer. So every member makes a new reducer when the world changes, by the code that DDP runs after
unpickling. Parameters, gradients, optimizer and compiled code are untouched.

Other attributes also decide which collectives a forward or a backward makes. `renew` resets one of
them, members copy `switches` from one another, and `described` returns the constructor's arguments
for comparison. No other module uses private names of DDP (2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

_MODULE = DistributedDataParallel.__module__
# There are five calls between the constructor and a collective that it makes.
_FRAMES_MAX = 12
# Communication hooks of torch that count steps or keep random streams in their state: a joining
# worker, or one that lost a step, would make other collectives than the rest.
_STATEFUL_HOOKS = frozenset(("PowerSGDState", "PostLocalSGDState"))
# Modules of torch's communication hooks that call further collectives in callbacks of futures.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_CHAINED = tuple(_HOOKS + name for name in ("powerSGD_hook", "ddp_zero_hook", "quantization_hooks"))


def accept_builtin_hooks(kind: type[ProcessGroup]) -> None:
    """Let modules over a group of class `kind` take torch's communication hooks of C++.

    That of fp16 fails on the results of a group in Python, so the hook of torch in Python takes its
    place. Idempotent.
    """
    ours: Any = DistributedDataParallel
    kinds: Any = dist
    torchs: Callable[..., None] = ours._register_builtin_comm_hook
    if hasattr(torchs, "__wrapped__"):
        return

    @functools.wraps(torchs)
    def register(self: Any, comm_hook_type: Any) -> None:
        is_fp16 = comm_hook_type == kinds.BuiltinCommHookType.FP16_COMPRESS
        if is_fp16 and isinstance(self.process_group, kind):
            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            torchs(self, comm_hook_type)

    ours._register_builtin_comm_hook = register


def constructed(frame: FrameType, group: ProcessGroup) -> DistributedDataParallel | None:
    """Return the DDP over `group` whose method `frame` is; None for any other frame.

    A reducer asks its group for the size when it is made. Each DDP is found by that call, including
    one that was made with `init_sync=False`.
    """
    if frame.f_globals.get("__name__") != _MODULE:
        return None
    module = frame.f_locals.get("self")
    if not isinstance(module, DistributedDataParallel):
        return None
    return module if module.__dict__.get("process_group") is group else None


def is_constructed(frame: FrameType | None, group: ProcessGroup) -> bool:
    """Whether `frame` runs on behalf of the constructor of a DDP over `group`."""
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return False
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            module = frame.f_locals.get("self")
            return getattr(module, "__dict__", {}).get("process_group") is group
        frame = frame.f_back
    return False


def renew(module: DistributedDataParallel) -> None:
    """Give `module` a new reducer for the current world."""
    ddp: Any = module
    if "reducer" not in ddp.__dict__:
        return  # its constructor did not complete, or it has no parameter to reduce
    # Drop the old one first: it removes its hooks and frees its buckets.
    ddp.reducer = ddp.logger = None
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    ddp._has_rebuilt_buckets = False
    ddp._static_graph_delay_allreduce_enqueued = False
    # A forward without gradients leaves this False, and the next one broadcasts no buffers.
    ddp.require_forward_param_sync = True
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]


def rebuild_buckets(module: DistributedDataParallel) -> None:
    """Let the buckets have the order of the last pass, as a forward does it."""
    ddp: Any = module
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def hush(module: DistributedDataParallel) -> None:
    """Make `module` reduce no gradients and broadcast no buffers: deterministic mode does both."""
    module.require_backward_grad_sync = False
    module.require_forward_param_sync = False


def switches(module: DistributedDataParallel) -> list[bool]:
    """Return the attributes that a training loop sets and that decide about collectives."""
    return [module.require_backward_grad_sync, *module._join_config]


def switch(module: DistributedDataParallel, values: list[bool]) -> None:
    """Set the values of another member's `switches`."""
    sync, *join = values
    module.require_backward_grad_sync = sync
    module._join_config = _JoinConfig(*join)


def described(module: DistributedDataParallel) -> dict[str, Any]:
    """Return by name, for JSON, the other settings that decide which collectives `module` makes."""
    ddp: Any = module
    by_id = {id(p): name for name, p in ddp.module.named_parameters()}
    parameters, expect_sparse = ddp._build_params_for_reducer()
    buffers = ddp.named_module_buffers.items()
    hook = getattr(ddp, "buffer_hook", None)
    return {
        "torch": torch.__version__,
        "parameters that require a gradient": [
            f"{by_id[id(p)]} {_shape(p)}{' sparse' if sparse else ''}"
            for p, sparse in zip(parameters, expect_sparse, strict=True)
        ],
        "buffers": [f"{name} {_shape(buffer)}" for name, buffer in buffers],
        "delayed parameters": len(ddp._delay_all_reduce_params),
        "broadcast_buffers": ddp.broadcast_buffers,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "skip_all_reduce_unused_params": ddp.skip_all_reduce_unused_params,
        "bucket_cap_mb": [ddp.bucket_bytes_cap / 2**20, *ddp.bucket_bytes_cap_list],
        "mixed_precision": str(ddp.mixed_precision),
        "python_reducer": ddp._use_python_reducer,
        "communication hooks": [_name(hook) for hook, _ in getattr(ddp, "_comm_hooks", ())],
        "buffer hook": "" if hook is None else _name(hook.buffer_comm_hook),
    }


def stateful_hook(module: DistributedDataParallel) -> str:
    """Return the class of a hook's state that cannot be the same on all members; or ""."""
    states = [state for _, state in getattr(module, "_comm_hooks", ())]
    return next((n for n in map(_class, states) if n in _STATEFUL_HOOKS), "")


def chained_hook(module: DistributedDataParallel) -> str:
    """Return the name of a hook of torch that calls collectives in callbacks of futures; or ""."""
    hooks = [hook for hook, _ in getattr(module, "_comm_hooks", ())]
    return next((_name(each) for each in hooks if _module(each) in _CHAINED), "")


def _module(function: Any) -> str:
    return str(getattr(function, "__module__", ""))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", _class(function)))


def _class(thing: object) -> str:
    return type(thing).__name__
