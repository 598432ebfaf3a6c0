"""The agent's decisions about its local worker group: orders of the coordinator, and ends of
workers.

`agent.rules.agent` decides whether there is a coordinator and whether this agent leaves. To the
shell, a group is named by the fence of its start; to the coordinator, by the fence of its world.
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
    """Decides for one local worker group at a time; set `now_s` before each call."""

    def __init__(self, node: NodeSpec, offer: PortOffer, contact: Contact, outbox: Outbox) -> None:
        self.node, self.offer = node, offer
        self.group: Group | None = None
        self.seen: Assignment | None = None
        self.now_s = 0.0
        self._contact, self._outbox = contact, outbox

    def receive(self, message: ToGroup, *, leaving: bool) -> None:
        """Do what the coordinator orders; `leaving`: this agent starts nothing any more."""
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

    def observe(self, event: AgentEvent) -> None:
        """Handle an event of the group or of one of its workers."""
        group = self.group
        match event:
            case GroupStarted(fence=fence, pids=pids) if group and fence == group.start_fence:
                self._log(EventKind.WORKERS_STARTED, f"{len(pids)} workers", pids=str(pids))
            case WorkerSucceeded(fence=fence, local_rank=rank) if (
                group and fence == group.start_fence
            ):
                self._succeeded(group, rank)
            case WorkerFailed(fence=fence) if group and fence == group.start_fence:
                self._failed(group, event.failure, event.ended_s)
            case GroupAble(fence=fence) if group and fence == group.start_fence:
                self._able(group, event)
            case WorkerLost(fence=fence, world=world, reason=reason) if (
                group and fence == group.start_fence and world == group.fence
            ):
                group.interrupted = reason
                self._outbox.send(Lost(fence=world, reason=reason))
            case ReplicaDiffered(fence=fence) if group and fence == group.start_fence:
                self._differed(event)
            case GroupMarked(fence=fence, calls=calls) if group and self._is_draining(fence):
                self._outbox.send(Marked(fence=group.fence, calls=calls))
            case GroupDrained(fence=fence, stops=stops) if group and self._is_draining(fence):
                self._drained(group, stops=stops)
            case GroupGone(fence=fence, offer=offer) if group is None or fence == group.start_fence:
                self._gone(fence, offer)
            case _:
                pass  # From a group that no longer exists.

    def stop(
        self,
        group: Group,
        grace_s: float,
        reason: str,
        *,
        asked: bool = False,
        since_s: float | None = None,
    ) -> None:
        """Stop the workers; a later call may shorten the grace but never lengthens it.

        A worker that ended after `since_s` (default: now) counts as stopped.
        """
        by_s = self.now_s + grace_s
        if group.stop_by_s is not None and by_s >= group.stop_by_s:
            return
        group.stop_by_s = by_s
        if group.stop_from_s is None:
            group.stop_from_s = self.now_s if since_s is None else since_s
        group.unasked = group.unasked or (group.phase != "stopping" and not asked)
        group.phase = "stopping"
        self._log(EventKind.WORKERS_STOPPING, reason, grace_s=grace_s)
        self._outbox.add(StopGroup(group.start_fence, grace_s, reason))

    def _start(self, assignment: Assignment, *, leaving: bool) -> None:
        if leaving or self.group is not None:
            # A repeated order, or one that came after the order to leave: the coordinator learns
            # from this agent's registration which workers it has.
            return
        if not self._may_act() or self._has_other_port(assignment):
            # Either the message waited in a buffer while this host stood still, and the others have
            # a newer world by now. Or it crossed with a report of this agent, which has since
            # closed the port.
            self._outbox.add(Decline(assignment.fence))
            return
        self.group, self.seen = Group(assignment, assignment.fence), assignment
        self._log(EventKind.WORKERS_STARTING, assignment.reason)
        self._outbox.add(StartGroup(assignment))

    def _has_other_port(self, assignment: Assignment) -> bool:
        """Whether the world would meet at a port of this node that it no longer holds."""
        return assignment.node_rank == 0 and assignment.master_port != self.offer.port

    def _may_act(self) -> bool:
        """Whether the deciding coordinator had authority recently enough."""
        self._contact.decision_received()
        return self.now_s - self._contact.authority_s < ISOLATION_LIMIT_S

    def _regroup(self, assignment: Assignment, *, leaving: bool) -> None:
        """Give the running workers their places in another world."""
        group = self.group
        if group is None:
            if not leaving:
                self._outbox.add(Decline(assignment.fence))  # The workers have ended since.
            return
        finished = group.has_finished(assignment.workers)
        if finished or group.phase == "stopping" or not self._may_act():
            self._stay_out(group, assignment.fence, finished=finished)
            return
        group.enter(assignment)
        self.seen = assignment
        self._log(EventKind.WORKERS_REGROUPED, assignment.reason, workers=len(assignment.workers))
        able = tuple(i for i in assignment.workers if i in group.recoverable)
        self._outbox.add(RegroupWorkers(group.start_fence, assignment, able))
        if group.failures:
            # No replacement was started for these: their report may have crossed with this
            # assignment.
            if not group.failures.keys().isdisjoint(assignment.workers):
                group.phase = "failed"
            failures = group.aged_failures(self.now_s)
            self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _stay_out(self, group: Group, fence: Fence, *, finished: bool) -> None:
        """Adopt the epoch of a world these workers will not join, and report why."""
        group.move(fence)
        if finished:
            self._outbox.send(Succeeded(fence))
        elif group.phase != "stopping":
            # The order waited in a buffer while this host stood still, so the coordinator must
            # decide again.
            group.interrupted = "was given its place too late: its host stood still"
            self._outbox.send(Lost(fence=fence, reason=group.interrupted))

    def _prepare(self, message: Prepare, *, leaving: bool) -> None:
        """Start the workers that are not running; they become standbys beside the current world."""
        group = self.group
        if leaving or (group is None and message.successors):
            return
        if group is None:
            self.group = Group(message.assignment, message.assignment.fence)
            self._log(EventKind.WORKERS_STARTING, message.assignment.reason)
            self._outbox.add(StartGroup(message.assignment))
            return
        missing = group.ranks_to_replace()
        if missing and group.phase not in ("stopping", "succeeded"):
            self._log(EventKind.WORKERS_STARTING, message.assignment.reason, workers=len(missing))
            self._outbox.add(
                StartWorkers(group.start_fence, missing, message.assignment, message.delay_s)
            )

    def _interrupt(self, fence: Fence, reason: str) -> None:
        group = self.group
        if group is not None and group.fence == fence and group.phase != "stopping":
            self._log(EventKind.WORKERS_INTERRUPTED, reason)
            group.interrupted = reason
            self._outbox.add(InterruptGroup(group.start_fence, reason))

    def _stop(self, message: Stop) -> None:
        group = self.group
        if group is None:
            self._outbox.send(Stopped(message.fence, self.offer))
        elif group.fence <= message.fence:  # This agent may not have received its newest world yet.
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
            # A new coordinator continues the drain of the previous one: the target stays.
            calls = group.target - 1 if group.target is not None else None
            self._outbox.send(Marked(fence=fence, calls=calls))
            return
        group.draining = True
        self._log(EventKind.WORKERS_DRAINING, "asked to checkpoint before a planned change")
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
        group.update_recoverable(workers, self.node.local_world_size)
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
        group.recoverable = tuple(i for i in group.recoverable if i != local_rank)
        self._log(EventKind.WORKER_EXITED, "exit code 0", local_rank=local_rank)
        if group.phase == "running" and group.is_done(self.node.local_world_size):
            group.phase = "succeeded"
            self._outbox.send(Succeeded(group.fence))

    def _failed(self, group: Group, failure: Failure, ended_s: float) -> None:
        stopped = group.was_stopped(ended_s)
        data = failure_data(aged(failure, ended_s, self.now_s), stopped=stopped)
        self._log(EventKind.WORKER_EXITED, failure_text(failure), **data)
        if stopped:
            return
        # A worker that failed before the stop may be the first cause of the incident.
        if group.phase != "stopping" and group.has_place(failure.local_rank):
            group.phase = "failed"
        group.add_failure(failure, ended_s)
        failures = group.aged_failures(self.now_s)
        self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _differed(self, event: ReplicaDiffered) -> None:
        data = {"rank": event.rank, "local_rank": event.local_rank, "steps": event.steps}
        self._log(EventKind.REPLICA_DIFFERED, event.reason, **data)

    def _gone(self, fence: Fence, offer: PortOffer) -> None:
        self.offer, unasked = offer, False
        if self.group is not None:
            unasked = self.group.unasked
            fence, self.group = self.group.fence, None
            text = "no process of the group is left"
            self._log(EventKind.WORKERS_STOPPED, text, at=str(fence))
        self._outbox.send(Stopped(fence, offer, unasked))

    def _log(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        self._outbox.fence = self.group.fence if self.group else None
        self._outbox.log(kind, reason, **data)
