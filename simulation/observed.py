"""What the checks of a history observe of its cluster: attributes alone, changed by the cluster.

`cluster` gives itself to the checks, so they name here what they read and do not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from elastane.agent.rules import AgentCore
from elastane.coordinator.rules import Rendezvous
from elastane.protocol.effects import Exit
from elastane.protocol.model import Fence, JobSpec, Outcome, WorldMember
from simulation.clock import VirtualClock
from simulation.name_checks import NameCheck
from simulation.network import Network
from simulation.places import InPlaceGroup
from simulation.runs import LocalGroup
from simulation.script import Script


class ObservedNode(Protocol):
    """One host: see `node.SimulatedNode`."""

    name: str
    size: int
    node_rank: int | None
    alive: bool
    paused: bool  # its agent stands still
    life: int
    incarnation: str
    welcomed: bool
    signalled: bool
    signals: int
    exit: Exit | None
    core: AgentCore | None
    group: LocalGroup | None

    @property
    def is_linked(self) -> bool:
        """Whether its agent has a session with a coordinator."""


class ObservedCoordinator(Protocol):
    """One coordinator: see `coordinator.SimulatedCoordinator`."""

    machine: Rendezvous
    leaving: set[int]
    names: NameCheck
    fenced: frozenset[str]

    @property
    def now_s(self) -> float:
        """The coordinator's time, by its host's clock less what it stood still."""

    @property
    def is_elected(self) -> bool:
        """Whether the job has a store, in which this coordinator took the lease."""


class ObservedCluster(Protocol):
    """The job and the faults so far: see `cluster.SimulatedCluster`."""

    clock: VirtualClock
    network: Network
    spec: JobSpec
    script: Script
    store_backed: bool
    in_place: bool
    given_up: tuple[str, ...]
    coordinators_started: int
    upset: bool
    torn: bool
    drained: bool

    @property
    def nodes(self) -> Mapping[str, ObservedNode]:
        """Hosts by name."""

    def together(self, names: Sequence[str]) -> list[str]:
        """Return the hosts among these on the larger side of cuts that keep them apart."""

    @property
    def coordinators(self) -> Mapping[str, ObservedCoordinator]:
        """Coordinators that run, by host."""

    @property
    def groups(self) -> list[InPlaceGroup]:
        """The workers that recover in place, by node."""

    @property
    def most(self) -> int:
        """The greatest number of nodes with a place."""

    @property
    def saved_step(self) -> int:
        """The step of the last checkpoint."""


class RecordedJob:
    """What the job's record said so far: the members of each world, and the outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        # By time: an endpoint without memory commits a round again.
        self._members: dict[Fence, tuple[WorldMember, ...]] = {}

    def commit(self, fence: Fence, members: tuple[WorldMember, ...]) -> bool:
        """Record a world; return whether it is the first of its fence."""
        is_new = self._members.pop(fence, None) is None
        self._members[fence] = members
        return is_new

    def __contains__(self, fence: Fence) -> bool:
        return fence in self._members

    def members(self, fence: Fence) -> tuple[WorldMember, ...]:
        """Return the members of the world of `fence`, which was committed."""
        return self._members[fence]

    def members_before(self, fence: Fence) -> tuple[WorldMember, ...]:
        """Return the members of the last world that was committed before the one of `fence`."""
        known = [*self._members]
        before = known[: known.index(fence)] if fence in self._members else known
        return self._members[before[-1]] if before else ()

    def between(self, first: Fence, last: Fence) -> list[tuple[WorldMember, ...]]:
        """Return the members of all worlds that were committed between two others."""
        return [members for fence, members in self._members.items() if first < fence < last]
