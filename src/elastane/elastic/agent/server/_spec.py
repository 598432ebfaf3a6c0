"""The data of an agent: what it runs, its workers, and how they ended.

Names, fields and defaults are those of torch 2.13. There is no behaviour here. A spec that cannot
run raises AssertionError, as in torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

from elastane.elastic.multiprocessing.errors import ProcessFailure
from elastane.elastic.rendezvous import RendezvousHandler
from elastane.elastic.rendezvous._one_machine import OneMachineRendezvous

DEFAULT_ROLE = "default"


@dataclass
class WorkerSpec:
    """What the workers of one role run: one spec for each role, the same on all nodes.

    `entrypoint` is a callable, or a command as str. `args` are its arguments, in which
    `${local_rank}` is replaced by the local rank. `fn` is a deprecated name of `entrypoint`.
    `rdzv_handler` has the methods of RendezvousHandler, torch's or elastane's; the default is a job
    on this machine only. `master_addr` and `master_port` override those of the rendezvous.
    `monitor_interval` is in seconds.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler = field(default_factory=OneMachineRendezvous)
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size = {self.local_world_size}: expected 1 or more")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval = {self.monitor_interval}: expected above 0")
        if self.fn:
            warnings.warn(
                "WorkerSpec.fn is deprecated: use WorkerSpec.entrypoint",
                category=DeprecationWarning,
                stacklevel=2,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("entrypoint is missing: expected a callable or a command")

    def get_entrypoint_name(self) -> str:
        """Return the callable's qualified name, or the last part of the command's path."""
        if isinstance(self.entrypoint, str):
            return PurePath(self.entrypoint).name
        assert self.entrypoint is not None
        # A functools.partial has no name of its own.
        return getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__qualname__)


class Worker:
    """The ranks of one worker; `id` is set by the agent, a pid in LocalElasticAgent."""

    __slots__ = ["global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size"]

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank}"
            f",role_rank={self.role_rank},world_size={self.world_size}"
            f",role_world_size={self.role_world_size}"
        )

    def __repr__(self) -> str:
        return str(self)


class WorkerState(str, Enum):  # noqa: UP042 - its text is torch's
    """The state of a worker group, which all its workers share: one failure fails all.

    INIT until the first start; HEALTHY or UNHEALTHY while they run; STOPPED by the agent, before a
    restart; SUCCEEDED or FAILED at the end; UNKNOWN if the agent lost track of them.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether worker processes exist, healthy or not."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """An agent's workers. The rendezvous sets the fields that are None at first."""

    __slots__ = [
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    ]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """How a run ended: all local workers succeeded, or it failed.

    `return_values` (of callables; None for commands) and `failures` are by global rank. Workers
    that the agent stopped are in neither.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether it failed."""
        return self.state == WorkerState.FAILED
