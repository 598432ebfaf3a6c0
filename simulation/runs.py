"""The workers of plain scripts, and the worlds in which they train.

Facts alone, as `places` has those of workers that recover in place. `workers` makes them act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastane.protocol.events import AgentEvent
from elastane.protocol.model import Assignment, Fence
from simulation.clock import Timer


@dataclass(slots=True, eq=False)
class LocalGroup:
    """One node's workers of one fence."""

    host: str
    assignment: Assignment
    size: int
    feed: Callable[[AgentEvent], None]
    phase: str = "starting"  # computing, broken, done, gone
    calls: int = 0
    gated: bool = False
    drain: int = 0  # the number of its last drain
    target: int | None = None
    saved: bool = False
    end: Timer | None = None
    failed: set[int] = field(default_factory=set)
    run: SimulatedRun | None = None
    moved_s: float = 0.0
    killed: bool = False  # all of it, by the orphan reaper
    is_still: bool = False  # its agent has reported that its workers make no collective

    @property
    def fence(self) -> Fence:
        """The fence of its assignment."""
        return self.assignment.fence

    @property
    def passed(self) -> int:
        """The last call that a worker of it has come back from."""
        return self.calls

    @property
    def computes(self) -> bool:
        """Whether all its workers still take part in training."""
        return self.phase == "computing"


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """The training of one world, from the checkpoint that it started at."""

    fence: Fence
    nodes: int
    base: int
    groups: dict[int, LocalGroup] = field(default_factory=dict)
    steps: int = 0
    busy: bool = False
    target: int | None = None
    wrote: bool = False  # a checkpoint

    @property
    def hosts(self) -> list[str]:
        """Where its workers are."""
        return [group.host for group in self.groups.values()]

    @property
    def is_whole(self) -> bool:
        """Whether every member has workers that compute."""
        return len(self.groups) == self.nodes and all(g.computes for g in self.groups.values())
