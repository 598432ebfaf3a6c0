"""What must hold in every history, checked at every event that could break it.

A `Violation` says in one sentence what was broken. The invariants that production asserts too
come from `core.invariants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastane.core import invariants
from elastane.core.effects import Exit
from elastane.core.messages import Assign, ToAgent
from elastane.core.model import Assignment, Fence, Member, Outcome, Record, World
from elastane.errors import ExitCode

if TYPE_CHECKING:
    from elastane.testing.simulation.cluster import Cluster
    from elastane.testing.simulation.node import SimulatedNode
    from elastane.testing.simulation.seat import Seat
    from elastane.testing.simulation.workers import LocalGroup, Run


class Violation(AssertionError):
    """Something that must always hold did not."""


class Checks:
    """What was seen of one history, held against what must hold."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._durable: dict[Fence, tuple[Member, ...]] = {}
        self._rounds: dict[int, tuple[Member, ...]] = {}
        self._given: dict[Fence, dict[int, Assignment]] = {}
        self._started: dict[str, Fence] = {}
        self._targets: dict[Fence, int | None] = {}
        self._stepped: Fence | None = None
        self.outcome: Outcome | None = None
        self.restarts_used = 0
        self.settled = 0
        self.steps = 0
        self.step_s = 0.0

    def wrote(self, before: Record | None, after: Record, *, durable: bool) -> None:
        """A record was written; without a store it only shows what was decided."""
        if durable:
            self._require(not (fault := invariants.broken_record(before, after)), fault)
            if before is not None and before.world is not None and after.world is not None:
                self._placed(before.world, after.world)
        if self.outcome is not None and durable:
            self._require(after.outcome == self.outcome, "the job went on after its end")
        self.outcome = after.outcome
        allowed = self._cluster.spec.max_restarts
        self._require(
            after.restarts_used <= allowed,
            f"{after.restarts_used} restarts were used of {allowed} allowed",
        )
        self.restarts_used = max(self.restarts_used, after.restarts_used)
        crashes = self._cluster.training.crashes
        self._require(
            after.restarts_used <= crashes,
            f"{after.restarts_used} restarts were charged, but only {crashes} workers failed",
        )
        if after.world is not None:
            self._settled(after.world.fence, after.world.members, durable=durable)
        if after.outcome is not None:
            self._ended(after, after.outcome)

    def _placed(self, before: World, after: World) -> None:
        """Who arrives without a wish for a rank comes after all who were there."""
        known = {member.node_id for member in before.members}
        places = [
            member.node_id in known
            for member in after.members
            if member.node_id in known or self._cluster.nodes[member.node_id].node_rank is None
        ]
        self._require(
            places == sorted(places, reverse=True),
            f"{after.fence}: an arrival was put before survivors",
        )

    def _settled(self, fence: Fence, members: tuple[Member, ...], *, durable: bool) -> None:
        known = self._rounds.setdefault(fence.round, members)
        if known != members and not durable:
            # The endpoint came back without a memory, and nobody was left who could tell it.
            self._rounds[fence.round] = members
            self._given.pop(fence, None)
            self._targets.pop(fence, None)
        if durable:
            self._require(known == members, f"two memberships in round {fence.round}")
        self.settled += fence not in self._durable
        self._durable[fence] = members

    def _ended(self, record: Record, outcome: Outcome) -> None:
        if outcome.slug == "worker-failed":
            self._require(
                record.restarts_used == record.spec.max_restarts,
                f"the job failed with {record.restarts_used} of {record.spec.max_restarts}"
                " restarts used",
            )
        if outcome.ok:
            training = self._cluster.training
            self._require(
                training.saved_step >= training.script.steps,
                f"the job ended well at step {training.saved_step} of {training.script.steps}",
            )

    def sends(self, seat: Seat, message: ToAgent) -> None:
        """A coordinator sends."""
        if isinstance(message, Assign):
            given = message.assignment
            self._require(
                given.fence in self._durable, f"{given.fence} was assigned before it was durable"
            )
            self._ranked(given)

    def _ranked(self, given: Assignment) -> None:
        seats = self._given.setdefault(given.fence, {})
        self._require(
            seats.setdefault(given.node_rank, given).rank_base == given.rank_base,
            f"{given.fence}: two assignments of node rank {given.node_rank}",
        )
        members = self._durable[given.fence]
        sizes = [member.local_world_size for member in members]
        found = (given.nodes, given.world_size, given.rank_base)
        right = (len(sizes), sum(sizes), sum(sizes[: given.node_rank]))
        self._require(found == right, f"{given.fence}: assigned {found}, not {right}")

    def starts(self, node: SimulatedNode, assignment: Assignment) -> None:
        """An agent starts workers."""
        fence = assignment.fence
        # Without a store, an agent that is new has no memory that could hold the fences up.
        owner = node.name if self._cluster.store_backed else f"{node.name}.{node.life}"
        last = self._started.get(owner)
        self._require(
            last is None or fence > last, f"{node.name} started {fence} after it started {last}"
        )
        self._started[owner] = fence
        member = self._durable[fence][assignment.node_rank]
        self._require(
            (member.node_id, member.incarnation) == (node.name, f"{node.name}.{node.life}"),
            f"{node.name}.{node.life} started the workers of {member.incarnation}",
        )

    def stepped(self, run: Run) -> None:
        """A world has made a step: nobody of an older one may make another."""
        self.steps += 1
        self.step_s = self._cluster.clock.now_s
        if self._cluster.store_backed:
            self._require(
                self._stepped is None or run.fence >= self._stepped,
                f"{run.fence} made a step after {self._stepped} had: two sides train",
            )
            self._require(self.outcome is None, f"{run.fence} made a step after the job's end")
        self._stepped = run.fence

    def aims(self, node: SimulatedNode, group: LocalGroup, calls: int | None) -> None:
        """The workers of a node are told at which call to checkpoint."""
        known = self._targets.setdefault(group.fence, calls)
        self._require(
            known == calls, f"{group.fence}: told to checkpoint at call {known} and at {calls}"
        )
        self._require(
            calls is None or group.saved or group.calls < calls,
            f"{group.fence}: {node.name} made {group.calls} calls before it was told {calls}",
        )

    def exits(self, node: SimulatedNode, exit_: Exit) -> None:
        """An agent ends by its own decision."""
        allowed = {int(ExitCode.DRAINED)} if node.signalled else set[int]()
        if exit_.outcome is not None and exit_.outcome.slug == "no-coordinator":
            allowed.add(ExitCode.TRY_AGAIN)
        elif exit_.outcome is not None and exit_.outcome.slug == "job-closed":
            self._require(not node.welcomed, f"{node.name} was in the job, and was refused")
            allowed.add(ExitCode.CONFIGURATION)
        elif exit_.outcome is not None:
            known = ("", "worker-failed", "rdzv-timeout")
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
