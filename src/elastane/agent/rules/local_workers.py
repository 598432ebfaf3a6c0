"""The agent's decisions on its local worker group: what the coordinator asks, what workers do.

Whether there is a coordinator, and whether this agent is to leave, is `agent`'s. A group is named
by the fence that it was started with, to its shell; by that of its world, to the coordinator.
"""

from __future__ import annotations

from elastane.agent.rules.contact import Contact
from elastane.agent.rules.group import Group, aged, failure_data
from elastane.agent.rules.outbox import Outbox
from elastane.protocol.diagnosis import failure_text
from elastane.protocol.effects import (
    AimGroup,
    Decline,
    InterruptGroup,
    MarkGroup,
    RegroupWorkers,
    StartGroup,
    StartWorkers,
    StopGroup,
)
from elastane.protocol.events import (
    AgentEvent,
    GroupAble,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupStarted,
    ReplicaDiffered,
    WorkerFailed,
    WorkerLost,
    WorkerSucceeded,
)
from elastane.protocol.limits import ISOLATION_LIMIT_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    Assign,
    Drain,
    Drained,
    DrainTarget,
    Failed,
    Interrupt,
    Lost,
    Marked,
    Prepare,
    Stop,
    Stopped,
    Succeeded,
)
from elastane.protocol.model import Assignment, Failure, Fence, NodeSpec, PortOffer

ToGroup = Assign | Interrupt | Prepare | Stop | Drain | DrainTarget


class LocalWorkers:
    """Decides for one local worker group at a time; `now_s` is set before each call."""

    def __init__(self, node: NodeSpec, offer: PortOffer, contact: Contact, outbox: Outbox) -> None:
        self.node, self.offer = node, offer
        self.group: Group | None = None
        self.seen: Assignment | None = None
        self.now_s = 0.0
        self._contact, self._outbox = contact, outbox

    def told(self, message: ToGroup, *, leaving: bool) -> None:
        """Do what the coordinator asks; `leaving`: this agent starts nothing any more."""
        match message:
            case Assign(assignment=assignment) if assignment.in_place:
                self._regroup(assignment, leaving=leaving)
            case Assign(assignment=assignment):
                self._start(assignment, leaving=leaving)
            case Prepare():
                self._prepare(message, leaving=leaving)
            case Interrupt(fence=fence, reason=reason):
                self._interrupt(fence, reason)
            case Stop():
                self._stop(message)
            case Drain(fence=fence):
                self._drain(fence)
            case _:
                self._aim(message)

    def happened(self, event: AgentEvent) -> None:
        """Take in what became of the group, or of a worker of it."""
        group = self.group
        match event:
            case GroupStarted(fence=fence, pids=pids) if group and fence == group.born:
                self._tell(EventKind.WORKERS_STARTED, f"{len(pids)} workers", pids=str(pids))
            case WorkerSucceeded(fence=fence, local_rank=rank) if group and fence == group.born:
                self._succeeded(group, rank)
            case WorkerFailed(fence=fence) if group and fence == group.born:
                self._failed(group, event.failure, event.ended_s)
            case GroupAble(fence=fence) if group and fence == group.born:
                self._able(group, event)
            case WorkerLost(fence=fence, world=world, reason=reason) if (
                group and fence == group.born and world == group.fence
            ):
                group.halted = reason
                self._outbox.send(Lost(fence=world, reason=reason))
            case ReplicaDiffered(fence=fence) if group and fence == group.born:
                self._differed(event)
            case GroupMarked(fence=fence, calls=calls) if group and self._is_draining(fence):
                self._outbox.send(Marked(fence=group.fence, calls=calls))
            case GroupDrained(fence=fence, stops=stops) if group and self._is_draining(fence):
                self._drained(group, stops=stops)
            case GroupGone(fence=fence, offer=offer) if group is None or fence == group.born:
                self._gone(fence, offer)
            case _:
                pass  # Of a group that is no more.

    def stop(
        self,
        group: Group,
        grace_s: float,
        reason: str,
        *,
        asked: bool = False,
        since_s: float | None = None,
    ) -> None:
        """Stop the workers; a later call may shorten the grace, and none lengthens it.

        A worker that ended after `since_s` (now, where it is None) counts as stopped.
        """
        by_s = self.now_s + grace_s
        if group.stop_by_s is not None and by_s >= group.stop_by_s:
            return
        group.stop_by_s = by_s
        if group.stop_from_s is None:
            group.stop_from_s = self.now_s if since_s is None else since_s
        group.unasked = group.unasked or (group.phase != "stopping" and not asked)
        group.phase = "stopping"
        self._tell(EventKind.WORKERS_STOPPING, reason, grace_s=grace_s)
        self._outbox.add(StopGroup(group.born, grace_s, reason))

    def _start(self, assignment: Assignment, *, leaving: bool) -> None:
        if leaving or self.group is not None:
            # Told twice, or after it was told to go: the coordinator learns what is held.
            return
        if not self._may_act() or self._has_other_port(assignment):
            # It waited in a buffer while this host stood still; others have gone on since. Or it
            # crossed with news of this agent, which has closed the port by now.
            self._outbox.add(Decline(assignment.fence))
            return
        self.group, self.seen = Group(assignment, assignment.fence), assignment
        self._tell(EventKind.WORKERS_STARTING, assignment.reason)
        self._outbox.add(StartGroup(assignment))

    def _has_other_port(self, assignment: Assignment) -> bool:
        """Whether all are to meet at a port of this node that it does not keep for them."""
        return assignment.node_rank == 0 and assignment.master_port != self.offer.port

    def _may_act(self) -> bool:
        """Whether the coordinator that decided had authority not too long ago."""
        self._contact.decided()
        return self.now_s - self._contact.authority_s < ISOLATION_LIMIT_S

    def _regroup(self, assignment: Assignment, *, leaving: bool) -> None:
        """Give the workers that are here their place in another world."""
        group = self.group
        if group is None:
            if not leaving:
                self._outbox.add(Decline(assignment.fence))  # They are gone since.
            return
        over = group.is_over(assignment.workers)
        if over or group.phase == "stopping" or not self._may_act():
            self._stay_out(group, assignment.fence, over=over)
            return
        group.enter(assignment)
        self.seen = assignment
        self._tell(EventKind.WORKERS_REGROUPED, assignment.reason, workers=len(assignment.workers))
        able = tuple(i for i in assignment.workers if i in group.able)
        self._outbox.add(RegroupWorkers(group.born, assignment, able))
        if group.failures:
            # Nobody follows these yet: what was told of them may have crossed this assignment.
            if not group.failures.keys().isdisjoint(assignment.workers):
                group.phase = "failed"
            failures = group.aged_failures(self.now_s)
            self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _stay_out(self, group: Group, fence: Fence, *, over: bool) -> None:
        """Be of a world that the workers do not enter: what is told of them is for it."""
        group.move(fence)
        if over:
            self._outbox.send(Succeeded(fence))
        elif group.phase != "stopping":
            # It waited in a buffer while this host stood still; it is to be decided anew.
            group.halted = "was given its place too late: its host stood still"
            self._outbox.send(Lost(fence=fence, reason=group.halted))

    def _prepare(self, message: Prepare, *, leaving: bool) -> None:
        """Start the workers that do not run; they get ready beside the world in force."""
        group = self.group
        if leaving or (group is None and message.successors):
            return
        if group is None:
            self.group = Group(message.assignment, message.assignment.fence)
            self._tell(EventKind.WORKERS_STARTING, message.assignment.reason)
            self._outbox.add(StartGroup(message.assignment))
            return
        missing = group.start_anew()
        if missing and group.phase not in ("stopping", "succeeded"):
            self._tell(EventKind.WORKERS_STARTING, message.assignment.reason, workers=len(missing))
            self._outbox.add(StartWorkers(group.born, missing, message.assignment, message.delay_s))

    def _interrupt(self, fence: Fence, reason: str) -> None:
        group = self.group
        if group is not None and group.fence == fence and group.phase != "stopping":
            self._tell(EventKind.WORKERS_INTERRUPTED, reason)
            group.halted = reason
            self._outbox.add(InterruptGroup(group.born, reason))

    def _stop(self, message: Stop) -> None:
        group = self.group
        if group is None:
            self._outbox.send(Stopped(message.fence, self.offer))
        elif group.fence <= message.fence:  # It may not have heard of its last world.
            group.move(message.fence)
            self.stop(group, message.grace_s, message.reason, asked=True)

    def _drain(self, fence: Fence) -> None:
        group = self.group
        if group is None or group.fence != fence:
            return
        if group.phase != "running":
            self._outbox.send(Marked(fence=fence, calls=None))
            self._outbox.send(Drained(fence))
            return
        if group.aimed:
            # A new coordinator goes on with the drain of the last one: the target stays.
            calls = group.target - 1 if group.target is not None else None
            self._outbox.send(Marked(fence=fence, calls=calls))
            return
        group.draining = True
        self._tell(EventKind.WORKERS_DRAINING, "asked to checkpoint before a planned change")
        self._outbox.add(MarkGroup(fence))

    def _aim(self, message: DrainTarget) -> None:
        group, calls = self.group, message.calls
        if group is None or not self._is_draining(message.fence):
            return
        if not group.aimed:
            group.aimed, group.target, group.stops = True, calls, message.stops
        elif message.stops and not group.stops and group.target == calls is not None:
            group.stops, group.drained = True, False
        else:
            if group.drained:
                self._outbox.send(Drained(group.fence))
            return
        self._outbox.add(AimGroup(group.fence, calls, group.stops))

    def _able(self, group: Group, event: GroupAble) -> None:
        workers, self.offer = event.workers, event.offer
        group.be_able(workers, self.node.local_world_size)
        group.sharding = event.sharding or group.sharding
        self._outbox.send(
            Able(
                workers=workers,
                offer=event.offer,
                fence=group.fence,
                sharding=group.sharding,
            )
        )

    def _drained(self, group: Group, *, stops: bool) -> None:
        group.drained = stops or not group.stops
        if group.drained:
            self._outbox.send(Drained(group.fence))

    def _is_draining(self, fence: Fence) -> bool:
        group = self.group
        return group is not None and group.fence == fence and group.draining

    def _succeeded(self, group: Group, local_rank: int) -> None:
        if group.phase == "stopping":
            return
        group.done.add(local_rank)
        group.able = tuple(i for i in group.able if i != local_rank)
        self._tell(EventKind.WORKER_EXITED, "exit code 0", local_rank=local_rank)
        if group.phase == "running" and group.is_done(self.node.local_world_size):
            group.phase = "succeeded"
            self._outbox.send(Succeeded(group.fence))

    def _failed(self, group: Group, failure: Failure, ended_s: float) -> None:
        stopped = group.was_stopped(ended_s)
        data = failure_data(aged(failure, ended_s, self.now_s), stopped=stopped)
        self._tell(EventKind.WORKER_EXITED, failure_text(failure), **data)
        if stopped:
            return
        # One that failed before it was told to stop may be the first cause of all.
        if group.phase != "stopping" and group.has_place(failure.local_rank):
            group.phase = "failed"
        group.add_failure(failure, ended_s)
        failures = group.aged_failures(self.now_s)
        self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _differed(self, event: ReplicaDiffered) -> None:
        data = {"rank": event.rank, "local_rank": event.local_rank, "steps": event.steps}
        self._tell(EventKind.REPLICA_DIFFERED, event.reason, **data)

    def _gone(self, fence: Fence, offer: PortOffer) -> None:
        self.offer, unasked = offer, False
        if self.group is not None:
            unasked = self.group.unasked
            fence, self.group = self.group.fence, None
            text = "no process of the group is left"
            self._tell(EventKind.WORKERS_STOPPED, text, at=str(fence))
        self._outbox.send(Stopped(fence, offer, unasked))

    def _tell(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        self._outbox.fence = self.group.fence if self.group else None
        self._outbox.tell(kind, reason, **data)
