"""The agent's decisions: one local worker group, one coordinator that may come and go.

What is not acknowledged is not queued: after a break in the connection the agent registers
again and says what it holds, so nothing that happened meanwhile can be lost or told twice. While
the coordinator is away, healthy workers go on.
"""

from __future__ import annotations

from elastane.core.contact import Contact, not_found, refused
from elastane.core.diagnosis import failure_text
from elastane.core.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    Exit,
    MarkGroup,
    StartGroup,
    StopGroup,
    Tell,
    Transmit,
)
from elastane.core.events import (
    AgentEvent,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupStarted,
    Linked,
    Signalled,
    Tick,
    Told,
    Unlinked,
    Warm,
    WorkerFailed,
    WorkerSucceeded,
)
from elastane.core.group import Group, failure_data
from elastane.core.limits import ISOLATION_GRACE_S, ISOLATION_LIMIT_S, STOP_MARGIN_S
from elastane.core.messages import (
    Alive,
    Assign,
    Close,
    Drain,
    Drained,
    DrainTarget,
    Failed,
    Heartbeat,
    Join,
    Leave,
    Marked,
    Ready,
    Refused,
    Release,
    Report,
    Stop,
    Stopped,
    Succeeded,
    ToAgent,
    ToCoordinator,
    Welcome,
)
from elastane.core.model import Assignment, Failure, Fence, JobSpec, NodeSpec, Offer, Outcome
from elastane.core.notes import EventKind, Note
from elastane.errors import ExitCode


class AgentCore:
    """Decides for one agent; `handle` takes what happened and returns what is to be done.

    `self_fencing`: whether it must stop its workers when it has heard of no authority for
    ISOLATION_LIMIT_S (jobs with a store, where another coordinator may be elected).
    """

    def __init__(
        self, spec: JobSpec, node: NodeSpec, offer: Offer, now_s: float, *, self_fencing: bool
    ) -> None:
        self.spec, self.node, self.offer = spec, node, offer
        self.self_fencing = self_fencing
        self.ready = False
        self.contact = Contact(now_s)
        self.group: Group | None = None
        self.outcome: Outcome | None = None
        self.progress: int | None = None
        self._now_s = now_s
        self.welcomed = False
        self._seen: Assignment | None = None
        self._heartbeat_s = now_s
        self._leaving = ""
        self._leave_by_s: float | None = None
        self._exit: Exit | None = None
        self._exited = False
        self._out: list[AgentEffect] = []

    def handle(self, event: AgentEvent, now_s: float) -> list[AgentEffect]:
        """Take in `event` at `now_s` (monotonic seconds) and return what is to be done."""
        self._now_s = now_s
        match event:
            case Linked(offer=offer):
                self._link(offer)
            case Unlinked(reason=reason):
                self._unlink(reason)
            case Told(message=message):
                self._told(message)
            case Warm():
                self._warm()
            case Signalled(name=name):
                self._signalled(name)
            case Tick():
                pass
            case _:
                self._group_event(event)
        self._keep_time()
        out, self._out = self._out, []
        return out

    @property
    def wake_s(self) -> float:
        """When a Tick is needed at the latest, in monotonic seconds."""
        due = self._heartbeat_s
        if self.self_fencing and self.group is not None and self.group.phase == "running":
            due = min(due, self.contact.authority_s + ISOLATION_LIMIT_S)
        if self._leave_by_s is not None:
            due = min(due, self._leave_by_s)
        return max(due, self._now_s)

    @property
    def linked(self) -> bool:
        """Whether there is a session with a coordinator."""
        return self.contact.linked

    def _link(self, offer: Offer | None) -> None:
        self.offer = self.offer if offer is None else offer
        self.contact.begin(self._now_s)
        self._heartbeat_s = self._now_s + self.spec.timing.heartbeat_s
        self._send(
            Join(
                spec=self.spec,
                node=self.node,
                offer=self.offer,
                holding=self.group.holding(self._now_s) if self.group else None,
                ready=self.ready,
                welcomed=self.welcomed,
                seen=self._seen.fence if self._seen else None,
                restarts_seen=self._seen.restarts_used if self._seen else 0,
            )
        )
        if self._leaving:
            self._send(Leave(self._leaving))

    def _unlink(self, reason: str) -> None:
        if self.linked:
            self._tell(EventKind.COORDINATOR_AWAY, reason)
        self.contact.end(reason, self._now_s)
        if self._leaving and self.group is None:
            self._leave_now("the coordinator is away")

    def _warm(self) -> None:
        if not self.ready:
            self.ready = True
            if self.linked:
                self._send(Ready())

    def _told(self, message: ToAgent) -> None:
        match message:
            case Welcome(phase=phase, reason=reason):
                self.welcomed = True
                self._tell(EventKind.COORDINATOR_FOUND, f"the job is {phase}: {reason}")
            case Refused():
                self._refused(message)
            case Assign(assignment=assignment):
                self._assigned(assignment)
            case Stop():
                self._stop(message)
            case Drain(fence=fence):
                self._drain(fence)
            case DrainTarget(fence=fence, calls=calls):
                self._aim(fence, calls)
            case Release() | Close():
                self._dismissed(message)
            case Alive(authority=authority):
                self.contact.answered(authority)
            case Report():
                pass

    def _refused(self, message: Refused) -> None:
        self.outcome = refused(message)
        self._end(self.outcome.exit_code, message.what)

    def _dismissed(self, message: Release | Close) -> None:
        if isinstance(message, Release):
            self._end(ExitCode.DRAINED, f"released: {message.reason}")
            return
        self.outcome = message.outcome
        self._end(message.outcome.exit_code, message.outcome.reason)

    def _assigned(self, assignment: Assignment) -> None:
        if self._exit is not None or self.group is not None:
            # Told twice, or after it was told to go: the coordinator learns what is held.
            return
        self.contact.decided()
        if self._now_s - self.contact.authority_s >= ISOLATION_LIMIT_S:
            # It waited in a buffer while this host stood still; others have gone on since.
            self._out.append(Decline(assignment.fence))
            return
        self.group, self._seen = Group(assignment), assignment
        self._tell(EventKind.WORKERS_STARTING, assignment.reason)
        self._out.append(StartGroup(assignment))

    def _stop(self, message: Stop) -> None:
        group = self.group
        if group is None or group.fence != message.fence:
            if group is None:
                self._send(Stopped(message.fence, self.offer))
            return
        self._stop_group(group, message.grace_s, message.reason)

    def _drain(self, fence: Fence) -> None:
        group = self.group
        if group is None or group.fence != fence:
            return
        if group.phase != "running":
            self._send(Marked(fence=fence, calls=None))
            self._send(Drained(fence))
            return
        if group.aimed:
            # A new coordinator goes on with the drain of the last one: the target stays.
            calls = group.target - 1 if group.target is not None else None
            self._send(Marked(fence=fence, calls=calls))
            return
        group.draining = True
        self._tell(EventKind.WORKERS_DRAINING, "asked to checkpoint before a planned change")
        self._out.append(MarkGroup(fence))

    def _aim(self, fence: Fence, calls: int | None) -> None:
        group = self.group
        if group is None or not self._is_draining(fence):
            return
        if group.drained:
            self._send(Drained(fence))
        elif not group.aimed:
            group.aimed, group.target = True, calls
            self._out.append(AimGroup(fence, calls))

    def _is_draining(self, fence: Fence) -> bool:
        group = self.group
        return group is not None and group.fence == fence and group.draining

    def _group_event(self, event: AgentEvent) -> None:
        group = self.group
        match event:
            case GroupStarted(fence=fence, pids=pids) if group and fence == group.fence:
                self._tell(EventKind.WORKERS_STARTED, f"{len(pids)} workers", pids=str(pids))
            case WorkerSucceeded(fence=fence, local_rank=rank) if group and fence == group.fence:
                self._succeeded(group, rank)
            case WorkerFailed(fence=fence, failure=failure) if group and fence == group.fence:
                self._failed(group, failure)
            case GroupMarked(fence=fence, calls=calls) if self._is_draining(fence):
                self._send(Marked(fence=fence, calls=calls))
            case GroupDrained(fence=fence) if group and self._is_draining(fence):
                group.drained = True
                self._send(Drained(fence))
            case GroupGone(fence=fence, offer=offer) if group and fence == group.fence:
                self._gone(fence, offer)
            case GroupGone(fence=fence, offer=offer) if group is None:
                self.offer = offer
                self._send(Stopped(fence, offer))
            case _:
                pass  # Of a group that is no more.

    def _succeeded(self, group: Group, local_rank: int) -> None:
        if group.phase == "stopping":
            return
        group.done.add(local_rank)
        self._tell(EventKind.WORKER_EXITED, "exit code 0", local_rank=local_rank)
        if len(group.done) == self.node.local_world_size and group.phase == "running":
            group.phase = "succeeded"
            self._send(Succeeded(group.fence))

    def _failed(self, group: Group, failure: Failure) -> None:
        stopped = group.was_stopped(failure, self._now_s)
        data = failure_data(failure, stopped=stopped)
        self._tell(EventKind.WORKER_EXITED, failure_text(failure), **data)
        if stopped:
            return
        # One that failed before it was told to stop may be the first cause of all.
        group.add_failure(failure, self._now_s)
        group.phase = group.phase if group.phase == "stopping" else "failed"
        self._send(Failed(fence=group.fence, failures=group.aged_failures(self._now_s)))

    def _stop_group(self, group: Group, grace_s: float, reason: str) -> None:
        by_s = self._now_s + grace_s
        if group.stop_by_s is not None and by_s >= group.stop_by_s:
            return
        group.stop_by_s = by_s
        group.stop_from_s = self._now_s if group.stop_from_s is None else group.stop_from_s
        group.phase = "stopping"
        self._tell(EventKind.WORKERS_STOPPING, reason, grace_s=grace_s)
        self._out.append(StopGroup(group.fence, grace_s, reason))

    def _gone(self, fence: Fence, offer: Offer) -> None:
        self.group, self.offer = None, offer
        self._tell(EventKind.WORKERS_STOPPED, "no process of the group is left", at=str(fence))
        self._send(Stopped(fence, offer))
        if self._exit is not None:
            self._leave_with(self._exit)
        elif self._leaving and not self.linked:
            self._leave_now("the coordinator is away")

    def _signalled(self, name: str) -> None:
        self._tell(EventKind.SIGNAL, f"{name}: {'hurrying' if self._leaving else 'draining'}")
        if self._leaving:
            self._hurry(name)
            return
        self._leaving = name
        timing = self.spec.timing
        wait_s = timing.drain_timeout_s + timing.shutdown_timeout_s + STOP_MARGIN_S
        self._leave_by_s = self._now_s + wait_s
        if self.linked:
            self._send(Leave(name))
        elif self.group is None:
            self._leave_now("no coordinator to say goodbye to")
        else:
            self._stop_group(self.group, timing.shutdown_timeout_s, f"{name}, coordinator away")

    def _hurry(self, name: str) -> None:
        if self.group is not None:
            self._stop_group(self.group, 0.0, f"a second signal ({name})")
        self._end(ExitCode.DRAINED, f"a second signal ({name})")

    def _leave_now(self, why: str) -> None:
        self._end(ExitCode.DRAINED, f"{self._leaving}: {why}")

    def _end(self, code: int, reason: str) -> None:
        """Exit with `code`, once no worker is left."""
        if self._exit is None:
            self._exit = Exit(int(code), reason, self.outcome)
        group = self.group
        if group is None:
            self._leave_with(self._exit)
        elif group.phase != "stopping":
            # Workers that all succeeded are gone already; the shell then answers at once.
            self._stop_group(group, self.spec.timing.shutdown_timeout_s, reason)

    def _leave_with(self, exit_: Exit) -> None:
        if not self._exited:
            self._exited = True
            self._tell(EventKind.AGENT_STOPPED, exit_.reason, exit_code=exit_.code)
            self._out.append(exit_)

    def _keep_time(self) -> None:
        if self._now_s >= self._heartbeat_s:
            self._heartbeat_s = self._now_s + self.spec.timing.heartbeat_s
            fence = self.group.fence if self.group else None
            if self.linked:
                self.contact.asked(self._now_s)
            self._send(Heartbeat(fence=fence, progress=self.progress))
        if self._leave_by_s is not None and self._now_s >= self._leave_by_s:
            self._leave_by_s = None
            if self.group is not None:
                self._stop_group(self.group, 0.0, "the drain took longer than it may")
            self._end(ExitCode.DRAINED, "the drain took longer than it may")
        self._mind_isolation()
        self._mind_absence()

    def _mind_isolation(self) -> None:
        away_s = self._now_s - self.contact.authority_s
        group = self.group
        if not self.self_fencing or group is None or away_s < ISOLATION_LIMIT_S:
            return
        if group.phase == "succeeded":
            return  # No worker is left, and what they achieved is still to be told.
        self._stop_group(
            group,
            min(self.spec.timing.shutdown_timeout_s, ISOLATION_GRACE_S),
            f"no coordinator with authority for {away_s:.0f} s: another side of the network may"
            " have gone on",
        )

    def _mind_absence(self) -> None:
        """Give up on a coordinator that is not to be found, unless there are workers to keep."""
        limit_s = self.spec.timing.join_timeout_s
        if self.linked or self._exit is not None or self._now_s - self.contact.away_s < limit_s:
            return
        if self.group is not None and self.group.phase == "succeeded":
            self._end(ExitCode.DONE, "all local workers succeeded, and the coordinator is gone")
        elif self.group is None or self.group.phase == "failed" or self.group.draining:
            self.outcome = not_found(limit_s, self.contact.reason)
            self._end(self.outcome.exit_code, self.outcome.reason)

    def _send(self, message: ToCoordinator) -> None:
        if self.linked:
            self._out.append(Transmit(message))

    def _tell(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        fence = self.group.fence if self.group else None
        self._out.append(
            Tell(Note(kind=kind, reason=reason, node_id=self.node.node_id, fence=fence, data=data))
        )
