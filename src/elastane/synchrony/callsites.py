"""The call site of a collective, which decides its handling when a member is lost.

torch does not pass the caller to a group, so this module reads the Python frames below a call. A
C++ caller has no frame: the reducer of DistributedDataParallel is known by the frame of the engine
below it. Names of torch's modules are private to it (2.13); a caller that is not known is the
script, whose operations have the strictest rules. Never fails.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from elastane.comms import ddp
from elastane.process import collectives
from elastane.synchrony.operations import Site

_ENGINE = "torch.autograd.graph"
_RUN_BACKWARD = "_engine_run_backward"
_DDP = "torch.nn.parallel.distributed"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
# Between a caller and the group's method: torch's functions, and what records them.
_BETWEEN = frozenset(
    (
        *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
        collectives.__name__,
    )
)
# Modules that keep a part of the parameters on each worker.
_SHARDED = ("torch.distributed.fsdp.", "torch.distributed.tensor.")
# Functions of frameworks by module and name: a broadcast of what each member knows, and sums that
# the framework divides by the world size after they return. Without the packages' names: Lightning
# has two. Accelerate's sum is called by a function of its integration; its broadcast is of a random
# stream, as an iteration of a loader begins. Ignite's are the sums of its metrics.
_KNOWN = {
    ("loops.training_epoch_loop", "_broadcast_sigterm_tensor"): Site.AUTHORITY,
    ("utils.random", "synchronize_rng_state"): Site.AUTHORITY,
    ("utilities.distributed", "_sync_ddp"): Site.TRUE_SUM,
    ("accelerate", "mean_of_members"): Site.TRUE_SUM,
    ("metrics.metric", "another_wrapper"): Site.TRUE_SUM,
    ("metrics.running_average", "update"): Site.TRUE_SUM,
}
_LIGHTNING = ("lightning.pytorch.", "lightning.fabric.", "pytorch_lightning.", "lightning_fabric.")
_PACKAGES = (*_LIGHTNING, "accelerate.", "elastane.integrations.", "ignite.")
_KNOWN_NAMES = frozenset(name for _, name in _KNOWN)
# Between a framework's function and torch's: decorators, strategies, plugins.
_FRAMES_MAX = 16


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_in_nested_backward() -> bool:
    """Whether this thread runs a backward pass within another one.

    `torch.utils.checkpoint` with use_reentrant=True makes one for each of its segments.
    """
    passes = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and passes < 2:
        passes += frame.f_code.co_name == _RUN_BACKWARD and _module(frame) == _ENGINE
        frame = frame.f_back
    return passes > 1


def site_of(frame: FrameType | None) -> Site:
    """Return the site of an operation of a group; `frame` called the group's method.

    In a backward pass, a call from C++ is REDUCER. The caller of this function has to check that
    the tensor is a bucket.
    """
    if is_in_backward() and (frame is None or _module(frame) == _ENGINE):
        return Site.REDUCER
    while frame is not None and _module(frame) in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return Site.SCRIPT
    module = _module(frame)
    if module in (_DDP, ddp.__name__):
        return Site.AUTHORITY
    if module == _HOOKS:
        return Site.HOOK
    return _site_in_framework(frame)


def _site_in_framework(frame: FrameType | None) -> Site:
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        if _module(frame).startswith(_SHARDED):
            return Site.SHARDED
        name = frame.f_code.co_name
        if name in _KNOWN_NAMES and (site := _of_function(_module(frame), name)) is not None:
            return site
        frame = frame.f_back
    return Site.SCRIPT


def _of_function(module: str, name: str) -> Site | None:
    prefix = next((each for each in _PACKAGES if module.startswith(each)), None)
    return None if prefix is None else _KNOWN.get((module.removeprefix(prefix), name))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
