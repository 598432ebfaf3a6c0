"""Tells a framework of the user's own when the program sees another rank or world size."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from elastane.comms.elastic import ElasticGroup
from elastane.errors import ConfigurationError
from elastane.synchrony.ordered import OrderedGroup


def on_world_change(call: Callable[[int, int], None]) -> None:
    """Call `call(rank, world_size)` at each change of the rank or world size that a program sees.

    For a framework that keeps either of them. Call it on all workers, after
    `torch.distributed.init_process_group()`. The change happens inside of a collective, at the same
    place of the program on all workers, and `call` may run in another thread there: it stores the
    numbers, and calls nothing of torch.distributed. Without `elastane run --in-place` the world
    never changes. Raises ConfigurationError without a process group, and in a job of
    `elastane.init()`, where `job.rank` and `job.world_size` are current.
    """
    group = c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(group, OrderedGroup):
        group.on_change(call)
    elif group is None:
        raise ConfigurationError(
            "on_world_change() without a process group",
            slug="world-change",
            expected="a call after torch.distributed.init_process_group()",
            next_step="call init_process_group() first, on all workers",
        )
    elif isinstance(group, ElasticGroup):
        raise ConfigurationError(
            "on_world_change() in a job of elastane.init()",
            slug="world-change",
            expected="job.rank and job.world_size, which are those of the current step",
            next_step="read both in each step",
        )
