"""The growth of shrink-only worlds: what must hold of each planned restart of all workers.

A restart comes only right after a checkpoint that is whole, with all workers parked before a step
and none of them writing, and not sooner than the interval after the last start. If the drain is
called off instead, all workers continue. One coordinator grows a script only once that does not
resume. `budget_checks` has that a restart is not charged; `history`
has that no capacity waits for ever while checkpoints are written.
"""

from __future__ import annotations

from collections.abc import Callable

from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Assignment, Fence
from simulation.observed import ObservedCluster
from simulation.places import InPlaceGroup
from simulation.state_checks import StateChecks

# The worker that saved reports it after one more step; the boundary of the drain is one or two
# steps further, as messages take no step's time in a history that is strict.
_STEPS_SINCE_MAX = 4
# Agents start workers within this of the commit, where hosts are not slow.
_START_S = 1.0
# Workers continue within this after a drain was called off.
_RELEASE_S = 0.5


class GrowthCheck:
    """Records saved checkpoints and starts, and checks each growth against them."""

    def __init__(
        self,
        cluster: ObservedCluster,
        require: Callable[[bool, str], None],
        states: StateChecks,
    ) -> None:
        self._cluster, self._require, self._states = cluster, require, states
        self._whole: set[int] = set()  # the steps of checkpoints on storage
        self._drains = 0
        self._started: dict[Fence, float] = {}
        self._regrown: set[int] = set()  # coordinators that let a script grow which does not resume
        self.grown = 0
        self.called_off = 0

    def written(self, step: int) -> None:
        """Record a checkpoint that is whole."""
        self._whole.add(step)

    def starts(self, assignment: Assignment) -> None:
        """Record when the first node starts all its workers in a world."""
        self._started.setdefault(assignment.fence, self._cluster.clock.now_s)

    def noted(self, event: LogEvent) -> None:
        """Check a growth, as the coordinator has decided it, and a drain that was called off."""
        self._drains += event.kind is EventKind.DRAIN_STARTED
        if event.kind is EventKind.DRAIN_ENDED and event.data.get("called_off"):
            self._is_called_off(event)
        self._require(
            event.kind is not EventKind.REPLACEMENT or not self._cluster.script.shrinks,
            f"a worker of {event.fence} is replaced, though no other can join",
        )
        if event.kind is not EventKind.GROWTH:
            return
        self.grown += 1
        step = int(str(event.data["checkpoint"]).removeprefix("step-"))
        self._require(
            step in self._whole, f"{event.fence} is to restart at step {step}, which is not saved"
        )
        if self._states.is_strict and not self._cluster.script.resumes:
            coordinator = self._cluster.coordinators_started
            self._require(
                coordinator not in self._regrown,
                f"{event.fence} is to restart again, and its script does not resume",
            )
            self._regrown.add(coordinator)
        if self._states.is_strict and event.fence is not None:
            self._is_timely(event.fence, step)
            for group in self._groups(event.fence):
                self.stops(group)

    def _is_timely(self, fence: Fence, step: int) -> None:
        made = max((w.held for g in self._groups(fence) for w in g.inside()), default=step)
        self._require(
            made - step <= _STEPS_SINCE_MAX,
            f"{fence} is to restart at step {step}, and has made {made} steps",
        )
        started_s = max((at for of, at in self._started.items() if of <= fence), default=0.0)
        timing = self._cluster.spec.timing
        self._require(
            self._cluster.clock.now_s - started_s > timing.growth_interval_s - _START_S,
            f"{fence} is to restart {self._cluster.clock.now_s - started_s:.1f} s after its start",
        )

    def _is_called_off(self, event: LogEvent) -> None:
        self.called_off += 1
        cluster, fence = self._cluster, event.fence
        if not self._states.is_strict or fence is None:
            return
        before = cluster.coordinators_started, self._drains

        def released() -> None:
            # A node that leaves begins another drain at once, for which workers stay parked.
            if (cluster.coordinators_started, self._drains) != before:
                return
            if not self._states.is_strict:
                return
            parked = [
                w.name for g in self._groups(fence) for w in g.inside() if w.stage == "parked"
            ]
            self._require(
                not parked, f"{', '.join(parked)} stay parked in {fence}, whose drain is called off"
            )

        cluster.clock.after(_RELEASE_S, released)

    def _groups(self, fence: Fence) -> list[InPlaceGroup]:
        return [group for group in self._cluster.groups if group.fence == fence]

    def stops(self, group: InPlaceGroup) -> None:
        """Check workers that are killed at the boundary of a drain."""
        busy = [w.name for w in group.inside() if w.stage != "parked" or w.is_busy]
        self._require(
            not busy or group.crashed, f"{', '.join(busy)} is killed, and not parked before a step"
        )
