"""The behaviour of the user's script, and processes of its hosts that are stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the user's script behaves."""

    steps: int
    step_s: float
    checkpoint_every: int
    asks: bool  # calls should_checkpoint()
    leaves_on_sigterm: bool  # checkpoints and exits with 0 when a drain sends it SIGTERM
    trap_s: float  # otherwise, how long it continues after SIGTERM
    in_place: bool = False  # it uses the library: see `in_place_workers`
    heal_s: float = 0.5  # the longest transfer of one worker's state
    span: int = 0  # nodes per replica of a sharded state; 0: each worker has the whole
    shrinks: bool = False  # it is unmodified: its worlds recover in place, and only shrink
    planned: bool = False  # it is unmodified, and workers join at its boundaries
    resumes: bool = True  # it reads a checkpoint when it starts
    loads_after: int = 0  # of these: how many steps a process makes before there are boundaries
    keeps_rank: bool = False  # of these: only the worker that began as rank 0 saves and logs
    fails_at: int = 0  # a step at which one of its workers raises an error; 0: at none
    fails_times: int = 0  # in how many attempts; 0: in each
    ends_after_s: float = 0.0  # in place: how long that worker still lives, without its connections
    evaluates: bool = False  # its main thread is busy for a while after some of its checkpoints

    @property
    def is_unmodified(self) -> bool:
        """Whether it does not use the job's steps, and saves by itself."""
        return self.shrinks or self.planned


@dataclass(slots=True)
class StoppedProcesses:
    """Hosts on which a zygote, a store process or a snapshot server is stopped."""

    zygotes: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    snapshot_servers: set[str] = field(default_factory=set)
    is_overdue: Callable[[str], bool] = lambda _host: False  # whether workers there begin no step


class HasHosts(Protocol):
    """A world, as far as the network is concerned."""

    @property
    def hosts(self) -> list[str]:
        """Where its workers are."""
