"""What must hold in every history, checked at every event that could break it.

A `Violation` says in one sentence what was broken. Invariants that production asserts too come from
`coordinator.rules.invariants`. `budget_checks` has the restart budget, `history` has liveness.
"""

from __future__ import annotations

from itertools import accumulate, groupby

from elastane.coordinator.rules import invariants
from elastane.errors import ExitCode
from elastane.protocol.effects import Exit
from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import Assign, Close, ToAgent
from elastane.protocol.model import Assignment, Fence, JobRecord, Outcome, World, WorldMember
from simulation.boundary_checks import BoundaryCheck
from simulation.budget_checks import BudgetCheck, PerDeathBudgetCheck
from simulation.crash_checks import RepeatedCrashCheck
from simulation.cut_checks import CutCheck
from simulation.growth_checks import GrowthCheck
from simulation.observed import (
    ObservedCluster,
    ObservedCoordinator,
    ObservedNode,
    RecordedJob,
)
from simulation.places import InPlaceGroup
from simulation.runs import LocalGroup, SimulatedRun
from simulation.state_checks import StateChecks
from simulation.store import SimulatedRecord


class Violation(AssertionError):
    """An invariant did not hold."""


class Checks:
    """Observations of one history, and the invariants over them."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._recorded = RecordedJob()
        self._worlds: dict[Fence, list[tuple[WorldMember, ...]]] = {}
        self._rounds: dict[int, tuple[WorldMember, ...]] = {}
        self._bases: list[int] = []
        self._bases_of: tuple[WorldMember, ...] = ()
        self._given: dict[Fence, dict[int, Assignment]] = {}
        self._started: dict[str, Fence] = {}
        self._targets: dict[tuple[Fence, str, int], int | None] = {}
        self._stepped: Fence | None = None
        # When, and how many workers the connected nodes had.
        self.ended_s, self.here = 0.0, list[int]()
        self.crashes = RepeatedCrashCheck(cluster)
        self.budget = (PerDeathBudgetCheck if cluster.in_place else BudgetCheck)(cluster)
        self.boundaries = BoundaryCheck(cluster, self._require)
        self.states = StateChecks(
            cluster, self._recorded, self.boundaries, self._require, self.stepped
        )
        self.growth = GrowthCheck(cluster, self._require, self.states)
        self.cuts = CutCheck(cluster, self._require)
        self.settled = 0
        self.steps = 0
        self.step_s = 0.0

    @property
    def outcome(self) -> Outcome | None:
        """The end of the job, once it is recorded."""
        return self._recorded.outcome

    def filed(self, before: SimulatedRecord, after: SimulatedRecord) -> None:
        """Check a new record in the store: terms only grow, and a new term changes nothing else."""
        self._require(
            after.term >= before.term, f"term {after.term} has written after {before.term}"
        )
        if after.term > before.term:
            self._require(
                after.record == before.record, f"term {after.term} began with another record"
            )
        elif after.record is not None:
            self.wrote(before.record, after.record, durable=True)

    def noted(self, event: LogEvent) -> None:
        """Check an event of the log."""
        self.growth.noted(event)
        self.cuts.noted(event)
        self.boundaries.noted(event)
        self.crashes.noted(event)
        self._require(not (fault := self.budget.noted(event)), fault)

    def wrote(self, before: JobRecord | None, after: JobRecord, *, durable: bool) -> None:
        """Check a written record; without a store it only shows what was decided."""
        self._require(not (fault := invariants.broken_record(before, after)), fault)
        if before is not None and before.world is not None and after.world is not None:
            self._placed(before.world, after.world)
        if after.world is not None:
            self.boundaries.commits(before.world if before is not None else None, after.world)
        if self.outcome is not None and durable:
            self._require(after.outcome == self.outcome, "the job continued after its end")
        self._recorded.outcome = after.outcome
        if before is not None and after.restarts_used > before.restarts_used and after.world:
            self.crashes.charged(after.world.fence)
        self._require(not (fault := self.budget.wrote(after, durable=durable)), fault)
        if after.world is not None:
            self._settled(after.world.fence, after.world.members, durable=durable)
        if after.outcome is not None and (before is None or before.outcome is None):
            self._ended(after, after.outcome)

    def _placed(self, before: World, after: World) -> None:
        """Check that a node that arrives without a requested rank comes after all others.

        Others are those of its rack, whose nodes are next to each other.
        """
        if self._cluster.in_place:
            return  # The order is that of processes: see `state_checks`.
        known = {member.node_id for member in before.members}
        of_racks = [
            [*members] for _, members in groupby(after.members, lambda member: member.topology)
        ]
        for members in of_racks:
            places = [
                member.node_id in known
                for member in members
                if member.node_id in known or self._cluster.nodes[member.node_id].node_rank is None
            ]
            self._require(
                places == sorted(places, reverse=True),
                f"{after.fence}: an arrival was put before survivors",
            )
        racks = {member.topology for member in after.members}
        self._require(
            len(of_racks) == len(racks),
            f"{after.fence}: the nodes of a rack are apart",
        )

    def _settled(self, fence: Fence, members: tuple[WorldMember, ...], *, durable: bool) -> None:
        known = self._rounds.setdefault(fence.round, members)
        if known != members and not durable:
            # The endpoint came back without memory, and no agent was left that knew of the world.
            self._rounds[fence.round] = members
            for forgotten in [each for each in self._given if each.round == fence.round]:
                del self._given[forgotten]
        if durable:
            self._require(known == members, f"two memberships in round {fence.round}")
        self.settled += self._recorded.commit(fence, members)
        if members not in (worlds := self._worlds.setdefault(fence, [])):
            worlds.append(members)

    def _ended(self, record: JobRecord, outcome: Outcome) -> None:
        self.ended_s = self._cluster.clock.now_s
        able = [
            node
            for node in self._cluster.nodes.values()
            if not node.signalled and node.incarnation not in self._cluster.given_up
        ]
        linked = [node.size for node in able if node.is_linked]
        apart = self._cluster.together([node.name for node in able if node.alive])
        self.here = [self._cluster.nodes[name].size for name in apart] or linked
        if outcome.slug == "worker-failed":
            is_left = record.restarts_used < record.spec.max_restarts
            self._require(not (fault := is_left and self.crashes.ended(outcome)), str(fault))
        if outcome.ok:
            saved, steps = self._cluster.saved_step, self._cluster.script.steps
            self._require(
                saved >= steps,
                f"the job ended well at step {saved} of {steps}",
            )

    @property
    def nodes_stepped(self) -> int:
        """Return the number of nodes of the world that made the last step."""
        return len(self._recorded.members(self._stepped)) if self._stepped is not None else 0

    @property
    def restarts_used(self) -> int:
        """Return how many restarts were charged."""
        return self.budget.used

    def sends(self, coordinator: ObservedCoordinator, session: int, message: ToAgent) -> None:
        """Check a message of a coordinator."""
        fault = coordinator.names.sends(session, message, coordinator.now_s)
        self._require(not fault, fault)
        if isinstance(message, Assign):
            given = message.assignment
            self._require(
                session not in coordinator.leaving,
                f"{given.fence} was given to a node that is to leave",
            )
            self._require(
                given.fence in self._recorded, f"{given.fence} was assigned before it was durable"
            )
            self._ranked(given)
            members = self._recorded.members(given.fence)
            out = coordinator.fenced.intersection(m.incarnation for m in members)
            self._require(not out, f"{given.fence} has a place for {out}, whom the owner gave up")
        if isinstance(message, Close) and coordinator.is_elected:
            self._require(
                self.outcome == message.outcome, "agents were told of an end that is not durable"
            )

    def _ranked(self, given: Assignment) -> None:
        coordinators = self._given.setdefault(given.fence, {})
        self._require(
            coordinators.setdefault(given.node_rank, given).rank_base == given.rank_base,
            f"{given.fence}: two assignments of node rank {given.node_rank}",
        )
        members = self._recorded.members(given.fence)
        if self._bases_of is not members:
            self._bases_of = members
            self._bases = [0, *accumulate(member.size for member in members)]
        bases = self._bases
        # Hosts are reached by name here, so all members meet at the first member's.
        found = (given.nodes, given.world_size, given.rank_base, given.master_addr)
        right = (len(members), bases[-1], bases[given.node_rank], members[0].node_id)
        self._require(found == right, f"{given.fence}: assigned {found}, not {right}")

    def starts(self, node: ObservedNode, assignment: Assignment) -> None:
        """Check the start of an agent's workers."""
        fence = assignment.fence
        if assignment.waiting:
            return
        # Without a store, a new agent has no memory of earlier fences.
        owner = node.name if self._cluster.store_backed else f"{node.name}.{node.life}"
        last = self._started.get(owner)
        self._require(
            last is None or fence > last, f"{node.name} started {fence} after it started {last}"
        )
        self._started[owner] = fence
        self.growth.starts(assignment)
        self.placed(node, assignment)

    def placed(self, node: ObservedNode, assignment: Assignment) -> None:
        """Check a place in a world that an agent gives to its workers."""
        assert node.core is not None
        fence = assignment.fence
        self._require(
            assignment.node_rank > 0 or assignment.master_port == node.core.offer.port,
            f"{fence} is to meet at port {assignment.master_port} of {node.name}, which is free",
        )
        # A world that the endpoint's coordinator forgot may have had the same fence.
        worlds = self._worlds[fence][-1:] if self._cluster.store_backed else self._worlds[fence]
        rank = assignment.node_rank
        places = [
            (members[rank].incarnation, members[rank].workers)
            for members in worlds
            if rank < len(members)
        ]
        self._require(
            (f"{node.name}.{node.life}", assignment.workers) in places,
            f"{node.name}.{node.life} started the workers of {places}",
        )

    def meets(self, run: SimulatedRun, group: LocalGroup) -> None:
        """Check workers of a node that come to a process-group store."""
        self._require(
            run.fence == group.fence,
            f"workers of {group.fence} on {group.host} met those of {run.fence}",
        )

    def died(self, fence: Fence) -> None:
        """Record that a worker of this world ended by itself, and not by the script's error."""
        self.crashes.died(fence)
        self.budget.died(fence)

    def script_failed(self, fence: Fence, base: int) -> None:
        """Check an attempt that failed at its step, begun at the checkpoint of step `base`."""
        self.budget.died(fence)
        self._require(not (fault := self.crashes.failed(fence, base)), fault)

    def script_failed_in_place(self, fence: Fence) -> None:
        """Check a worker that failed at the script's step while others continue."""
        self.budget.died(fence)
        in_place = self.crashes.failed_in_place
        if self._cluster.script.planned:
            in_place = self.crashes.failed_at_boundaries
        self._require(not (fault := in_place(fence)), fault)

    def stepped(self, fence: Fence) -> None:
        """Record a step of a world, after which no older one may make any."""
        self.steps += 1
        self.step_s = self._cluster.clock.now_s
        if self._cluster.store_backed:
            self._require(
                self._stepped is None or fence >= self._stepped,
                f"{fence} made a step after {self._stepped} had: two sides train",
            )
            self._require(self.outcome is None, f"{fence} made a step after the job's end")
        self._stepped = fence

    def aims(self, node: ObservedNode, group: LocalGroup | InPlaceGroup, calls: int | None) -> None:
        """Check the call at which the workers of a node are asked to checkpoint."""
        at = group.assignment  # An endpoint without memory may commit a fence once more.
        met = (group.fence, at.master_addr, at.master_port)
        known = self._targets.setdefault(met, calls)
        self._require(
            known == calls, f"{group.fence}: told to checkpoint at call {known} and at {calls}"
        )
        self._require(
            calls is None or group.saved or group.passed < calls,
            f"{group.fence}: {node.name} went past call {group.passed} before it was told {calls}",
        )

    def released(self, group: InPlaceGroup) -> None:
        """Forget the target of a drain that was called off: the world may drain again."""
        at = group.assignment
        self._targets.pop((group.fence, at.master_addr, at.master_port), None)

    def exits(self, node: ObservedNode, exit_: Exit) -> None:
        """Check an agent that ends by its own decision."""
        allowed = {int(ExitCode.DRAINED)} if node.signalled else set[int]()
        if exit_.outcome is not None and exit_.outcome.slug == "no-coordinator":
            allowed.add(ExitCode.TRY_AGAIN)
        elif exit_.outcome is not None and exit_.outcome.slug == "job-closed":
            self._require(not node.welcomed, f"{node.name} was in the job, and was refused")
            allowed.add(ExitCode.CONFIGURATION)
        elif exit_.outcome is not None and exit_.outcome.slug == "node-fenced":
            given_up = node.incarnation in self._cluster.given_up
            self._require(given_up, f"{node.name} was turned away as if it were given up")
            allowed.add(ExitCode.TRY_AGAIN)
        elif exit_.outcome is not None:
            # `history` checks that the nodes on one side of a cut were too few.
            known = ("", "worker-failed", "rdzv-timeout", "world-stalled")
            self._require(
                exit_.outcome.slug in known, f"{node.name} was refused: {exit_.outcome.reason}"
            )
            allowed.add(exit_.outcome.exit_code)
        else:
            allowed.add(ExitCode.DONE)
        self._require(
            exit_.code in allowed, f"{node.name} exits with {exit_.code}, not one of {allowed}"
        )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)
