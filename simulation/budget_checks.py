"""The restart budget, checked against what really happened to the workers.

The simulation knows which workers died by themselves, in which world. Each charged restart must
have such a death in that world, and no world is charged twice. In a history without other faults
every world that lost a worker is charged, so the budget is exact.
"""

from __future__ import annotations

from elastane.coordinator.rules import MembershipPhase
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Fence, JobRecord
from simulation.observed import ObservedCluster

# What a new coordinator says of a node that it never met.
_NOT_BACK = "it did not come back to the new coordinator"


class BudgetCheck:
    """Deaths of workers by world, and what was charged; each method returns what is broken."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._deaths: set[Fence] = set()
        self._due: set[Fence] = set()  # worlds that must be charged
        self._charged: Fence | None = None
        self._used_at: dict[Fence, int] = {}
        self.used = 0

    def died(self, fence: Fence) -> None:
        """Record that a worker of this world died by itself."""
        if fence not in self._deaths and self._is_plain(fence):
            self._due.add(fence)
        self._deaths.add(fence)

    def wrote(self, record: JobRecord, *, durable: bool) -> str:
        """Check a record that was written."""
        fence = record.world.fence if record.world else None
        broken = self._charge(record, fence, durable=durable) if record.restarts_used else ""
        self.used = max(self.used, record.restarts_used)
        if fence is not None and fence not in self._used_at:
            broken = broken or self._follows(record, fence)
            self._used_at[fence] = record.restarts_used
        return broken

    def lost_state(self, fence: Fence) -> None:
        """Record that workers of this world ended because no member holds the state."""

    def asked_restart(self, fence: Fence) -> None:
        """Record that workers of this world ended because all have to restart after a loss."""

    def is_ending(self, pid: int) -> None:
        """Record that this worker has failed and lives on, so that its agent cannot see it yet."""

    def has_ended(self, pid: int) -> None:
        """Record that the agent of this worker has seen its end."""

    def noted(self, event: LogEvent) -> str:
        """Check an event: a node departs only after a death, a hang or a loss of the network.

        A new coordinator cannot tell a node that left from one that was lost with the last one.
        """
        if _NOT_BACK in event.reason:
            return ""
        node = self._cluster.nodes.get(event.node_id)
        if event.kind is not EventKind.NODE_DEPARTED or self._cluster.upset or node is None:
            return ""
        if node.exit is not None and not node.signals > 1:
            return f"{node.name} took its leave and was counted as departed: {event.reason}"
        return ""

    def _charge(self, record: JobRecord, fence: Fence | None, *, durable: bool) -> str:
        used, allowed = record.restarts_used, self._cluster.spec.max_restarts
        if used > allowed:
            return f"{used} restarts were used of {allowed} allowed"
        if used <= self.used:
            return ""
        if used > self.used + 1:
            return f"restarts used went from {self.used} to {used} at once"
        if fence not in self._deaths:
            return f"restart {used} was charged to {fence}, of which no worker died"
        if durable and self._charged is not None and fence is not None and fence <= self._charged:
            return f"{fence} was charged after {self._charged}"
        self._charged = fence
        return ""

    def _follows(self, record: JobRecord, fence: Fence) -> str:
        """After a world that only lost a worker, the next world is its next attempt."""
        before = max((known for known in self._used_at if known < fence), default=None)
        if before not in self._due or self._cluster.upset or self._cluster.drained:
            return ""
        if before is not None and record.restarts_used != self._used_at[before] + 1:
            return f"{before} lost a worker, and was not charged for it"
        if before is not None and fence != Fence(before.round, before.attempt + 1):
            return f"{before} lost a worker and nothing else, and {fence} followed it"
        return ""

    def _is_plain(self, fence: Fence) -> bool:
        """Whether this death is the only fault, and no node is arriving or leaving."""
        cluster = self._cluster
        if cluster.upset or cluster.drained or len(cluster.coordinators) != 1:
            return False
        phase = next(iter(cluster.coordinators.values())).machine.phase
        nodes = [node for node in cluster.nodes.values() if node.alive]
        inside = [node for node in nodes if node.group and node.group.fence == fence]
        is_full = len(inside) >= cluster.most
        return phase is MembershipPhase.RUNNING and (is_full or len(inside) == len(cluster.nodes))


class PerDeathBudgetCheck(BudgetCheck):
    """The same where workers recover in place: a world may lose workers and continue as another.

    Workers that die while others recover are of the same incident, so a charge has a death or
    more; one that dies before it has a place is charged by itself.
    """

    def __init__(self, cluster: ObservedCluster) -> None:
        super().__init__(cluster)
        self._dead = 0
        # Worlds that lost the state with workers of earlier ones, and worlds that lost workers.
        self._stateless: set[Fence] = set()
        self._lost: set[Fence] = set()
        self._asked: set[Fence] = set()  # worlds whose workers ended so that all restart
        self._ending: set[int] = set()  # by process id; one whose node is stopped is never reported
        # How many coordinators had started when the record of each world was written first.
        self._began: dict[Fence, int] = {}
        # The world of the last growth, and what was used and known then.
        self._grown: tuple[Fence, tuple[int, int], int] | None = None

    def died(self, fence: Fence) -> None:
        """Record that a worker died by itself; `fence` is of its node's last assignment."""
        self._dead += 1
        self._lost.add(fence)

    def lost_state(self, fence: Fence) -> None:
        """Record that workers of this world ended because no member holds the state."""
        self._stateless.add(fence)

    def asked_restart(self, fence: Fence) -> None:
        """Record that workers of this world ended because all have to restart after a loss."""
        self._asked.add(fence)

    def is_ending(self, pid: int) -> None:
        """Record that this worker has failed and lives on, so that its agent cannot see it yet."""
        self._ending.add(pid)

    def has_ended(self, pid: int) -> None:
        """Record that the agent of this worker has seen its end."""
        self._ending.discard(pid)

    def _charged_twice(self, record: JobRecord, *, durable: bool) -> bool:
        """Whether a world is charged for a state that it lost with workers of earlier worlds."""
        fence = record.world.fence if record.world else None
        if fence not in self._stateless or fence in self._lost or self._ending:
            return False
        if durable:
            return True
        # Without a record a new coordinator does not know what ended the world before.
        before = max((known for known in self._began if known < fence), default=None)
        return before is not None and self._began[before] == self._cluster.coordinators_started

    def noted(self, event: LogEvent) -> str:
        """Check an event, and take note of a growth."""
        if event.kind is EventKind.GROWTH and event.fence is not None:
            self._grown = (event.fence, self._known(), self.used)
        return super().noted(event)

    def _known(self) -> tuple[int, int]:
        """Count deaths and coordinators: a new one may charge a death that was charged before."""
        return self._dead, self._cluster.coordinators_started

    def _grew_for_free(self, record: JobRecord) -> bool:
        """Whether the last growth used no restart; once the next world is there it is settled."""
        if self._grown is None or record.world is None:
            return True
        of, known, used = self._grown
        if record.world.fence > of:
            self._grown = None
        return record.restarts_used <= used or known != self._known()

    def wrote(self, record: JobRecord, *, durable: bool) -> str:
        """Check a record that was written."""
        used, before = record.restarts_used, self.used
        if record.world is not None:
            self._began.setdefault(record.world.fence, self._cluster.coordinators_started)
        self.used = max(before, used)
        # A loss that only shrank the world is charged with the restart that follows it.
        is_more = used > max(before, len(self._lost))
        if is_more and self._charged_twice(record, durable=durable):
            return f"restart {used} was charged for a state that an earlier world had lost"
        if not self._grew_for_free(record):
            return f"restart {used} was charged for a growth"
        if used > self._cluster.spec.max_restarts:
            return f"{used} restarts were used of {self._cluster.spec.max_restarts} allowed"
        if used > before + 1:
            return f"restarts used went from {before} to {used} at once"
        # A coordinator that is new, or forgot a node, may charge a death again.
        again = self._dead if self._cluster.upset else self._cluster.coordinators_started - 1
        # Without a record a new coordinator does not know that the loss was charged, or was free.
        moved = self._cluster.coordinators_started > 1 and not durable
        free = len(self._asked | self._stateless) if moved else 0
        if used > self._dead + min(self._dead, again) + free:
            return f"{used} restarts were used, and {self._dead} workers died"
        return ""
