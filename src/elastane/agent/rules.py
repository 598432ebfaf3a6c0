"""The decisions of one agent, as pure code: events in, effects out, on the agent's monotonic clock.

Theory of operation. `AgentCore` decides about the connection and the departure of the agent;
`LocalWorkers` about the one `Group` of local workers that may exist. The coordinator orders what
the workers do; the agent alone decides to stop them when it has lost contact to a coordinator with
authority for too long. The agent keeps no queue of unacknowledged messages. After each break of the
connection it registers again and reports what it has, so nothing is lost and nothing is reported
twice. Healthy workers keep training while the coordinator is away.

The stages of the agent, and what moves it from one to another:

    stage        condition                                                  next stage
    -----------  ---------------------------------------------------------  ----------
    taking part  Refused, Release or Close                                  ending
                 a signal or notice, and no coordinator                     ending
                 a second signal                                            ending
                 a signal or notice, and the drain took longer than it may  ending
                 no coordinator for too long, and no worker trains          ending
    ending       no process of the workers is left                          exited

The states of the local workers. Every state but "none" is reported when the agent registers:

    state      condition                                                    next state
    ---------  -----------------------------------------------------------  ----------
    none       an Assign or a Prepare is accepted                           running
    running    every worker with a place exited with code 0                 succeeded
               a worker with a place failed                                 failed
               a Stop; or the agent ends, or is isolated                    stopping
    succeeded  a place in another world, for a worker started since         running
               a Stop; or the agent ends                                    stopping
    failed     a place in another world, with replacements                  running
               a Stop; or the agent ends, or is isolated                    stopping
    stopping   no process is left                                           none

A caller of `agent.membership` may leave at once: then its group ends from any state. A running
group that drains passes the stages of `DrainStage` besides. Workers that are interrupted stay
running, and wait for another world.

`Contact` holds when authority was last proved: as of the moment the agent asked, not of the moment
the answer came. While this host stood still, an answer may have waited in a buffer. Messages of a
session are ordered, so a message after the answer to a heartbeat was sent after that heartbeat.

To the shell, a group is named by the fence of its start; to the coordinator, by the fence of its
world.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import msgspec

from elastane.errors import ExitCode
from elastane.protocol.diagnosis import exit_text, failure_text, is_lost_peer
from elastane.protocol.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    EndGroupWorker,
    Exit,
    InterruptGroup,
    MarkGroup,
    RegroupWorkers,
    ReleaseGroup,
    ShowGroupStacks,
    StartGroup,
    StartWorkers,
    StopGroup,
    Transmit,
    TryAddresses,
    WriteEvent,
)
from elastane.protocol.events import (
    AddressesTried,
    AgentEvent,
    CulpritFound,
    GroupAble,
    GroupCalls,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupPaused,
    GroupStandstill,
    GroupStarted,
    GroupTraining,
    GroupWroteCheckpoint,
    Linked,
    MessageReceived,
    Notice,
    ReplicaDiffered,
    Signalled,
    Tick,
    Unlinked,
    Warm,
    WorkerFailed,
    WorkerLost,
    WorkerStacks,
    WorkerSucceeded,
)
from elastane.protocol.hangs import ranks_text
from elastane.protocol.limits import (
    FAILURES_MAX,
    ISOLATION_GRACE_S,
    LEAVE_ALONE_S,
    NOTICE_MARGIN_S,
    PROBE_EVERY_S,
    STOP_MARGIN_S,
    WAITING_MAX,
    Timing,
)
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import (
    Able,
    Alive,
    Assign,
    AwaitedWorker,
    CallOff,
    Checkpointed,
    Close,
    Drain,
    Drained,
    DrainTarget,
    EndWorker,
    Failed,
    GroupState,
    Heartbeat,
    Holding,
    Interrupt,
    Join,
    LastCalls,
    Leave,
    Lost,
    Marked,
    NodeCopies,
    Prepare,
    Probe,
    ProbeResult,
    Ready,
    Refused,
    Release,
    Report,
    Returned,
    ShowStacks,
    StandstillReport,
    Stop,
    Stopped,
    Succeeded,
    ToAgent,
    ToCoordinator,
    Welcome,
)
from elastane.protocol.model import (
    Assignment,
    Failure,
    Fence,
    JobSpec,
    Joining,
    NodeSpec,
    Outcome,
    PortOffer,
    Sharding,
    WaitPoint,
)
from elastane.protocol.stragglers import Pace
from elastane.protocol.verdicts import culprit_data
from elastane.protocol.words import counted, last_lines

# All failures of a report must fit into one frame, in any alphabet. The first ones say the most.
FULL_TEXTS_MAX = 32
SHORT_TEXT_CHARS = 200
# How much of the end of a worker's error text fits into an event's data.
EVENT_TEXT_CHARS = 500
ToGroup = (
    Assign | Interrupt | Prepare | Stop | Drain | DrainTarget | CallOff | EndWorker | ShowStacks
)


@dataclass(frozen=True, slots=True)
class Readings:
    """The shell's readings at the time of an event.

    `progress` and `met` come from the status pages: the smallest call count of the workers, and the
    smallest round in which one last met all others. `waiting`: where all of them wait for others;
    `all_wait`: they will wait forever. `paces`: the times of their last steps. `unanswered`: the
    addresses that do not answer them. `copies`: of their state. `slept_s`: how long this host was
    suspended so far, which the monotonic clock omits.
    """

    progress: int | None = None
    met: int = 0
    waiting: tuple[WaitPoint, ...] = ()
    all_wait: bool = False
    paces: tuple[Pace, ...] = ()
    unanswered: tuple[str, ...] = ()
    copies: NodeCopies | None = None
    slept_s: float = 0.0


NOTHING_READ = Readings()


class AgentStage(Enum):
    """The stage of the agent, from taking part to exited; the table is at the top."""

    TAKING_PART = auto()
    ENDING = auto()
    EXITED = auto()


@dataclass(frozen=True, slots=True)
class Leaving:
    """A signal or a notice asked the agent to leave.

    `by_s`: when its drain must be over; None once that time has passed. `out_by_s`: when its node
    goes; None: no deadline is known. `signalled`: a signal came, so another one is an order to
    hurry. `unfit`: the node cannot do its work, which its exit code says.
    """

    reason: str
    since_s: float
    by_s: float | None
    out_by_s: float | None = None
    signalled: bool = False
    unfit: bool = False

    @property
    def code(self) -> ExitCode:
        """The exit code of an agent that leaves a job which continues."""
        return ExitCode.NODE_UNFIT if self.unfit else ExitCode.DRAINED

    def within_s(self, now_s: float) -> float | None:
        """Return how long the drain may take from now on; None without a deadline."""
        if self.out_by_s is None:
            return None
        return max(0.0, (self.by_s or now_s) - now_s)

    def shorten(self, by_s: float, out_by_s: float) -> Leaving:
        """Return it with an earlier deadline; a deadline that has passed stays."""
        return replace(self, by_s=self.by_s and min(self.by_s, by_s), out_by_s=out_by_s)


class AgentCore:
    """Decides for one agent; `handle` takes an event and returns effects.

    `self_fencing`: whether the agent must stop its workers after the isolation limit without
    contact to a coordinator with authority. It is set for jobs with a store, where another
    coordinator may be elected.
    """

    def __init__(
        self,
        spec: JobSpec,
        node: NodeSpec,
        offer: PortOffer,
        now_s: float,
        *,
        self_fencing: bool,
        ready: bool = False,
    ) -> None:
        """`ready`: workers can be started at once, without an event `Warm`."""
        self.spec = spec
        self.node = node
        self.self_fencing = self_fencing
        self.ready = ready
        self.contact = Contact(now_s, spec.timing)
        self.outcome: Outcome | None = None
        self.welcomed = False
        self._now_s = now_s
        self._heartbeat_s = now_s
        self._leaving: Leaving | None = None
        self._stage = AgentStage.TAKING_PART
        self._exit: Exit | None = None
        self._outbox = Outbox(node.node_id, self.contact)
        self._probing = Probing()
        self._workers = LocalWorkers(node, offer, self.contact, self._outbox)

    def handle(
        self, event: AgentEvent, now_s: float, readings: Readings = NOTHING_READ
    ) -> list[AgentEffect]:
        """Handle `event` at `now_s` (monotonic seconds) and return the effects."""
        self._now_s = now_s
        self._workers.advance(now_s)
        self.contact.add_suspension(readings.slept_s)
        match event:
            case Linked(offer=offer):
                self._link(offer)
            case Unlinked(reason=reason):
                self._unlink(reason)
            case MessageReceived(message=message):
                self._receive(message)
            case AddressesTried(results=results):
                self._probing.end(results)
            case Warm():
                self._warm()
            case Signalled():
                self._signalled(event)
            case Notice():
                self._noticed(event)
            case Tick():
                pass
            case _:
                # If this agent itself stood still, workers that the orphan reaper killed did not
                # fail.
                self._check_isolation()
                self._workers.observe(event)
                if isinstance(event, GroupGone) and self.group is None:
                    self._gone()
        self._run_timers(readings)
        return self._outbox.pop()

    @property
    def group(self) -> Group | None:
        """The local worker group, as long as any process of it may be alive."""
        return self._workers.group

    @property
    def offer(self) -> PortOffer:
        """Where the next process-group store would be."""
        return self._workers.offer

    @property
    def wake_s(self) -> float:
        """The latest time of the next Tick, in monotonic seconds."""
        due = self._heartbeat_s
        if self.self_fencing and self.group is not None and self.group.phase == "running":
            due = min(due, self.contact.isolated_from_s)
        if self._leaving is not None and self._leaving.by_s is not None:
            due = min(due, self._leaving.by_s)
        return max(due, self._now_s)

    @property
    def train_until_s(self) -> float | None:
        """Until when workers may train if this agent stands still, by CLOCK_BOOTTIME.

        None: no bound, or no workers. The shell passes it on before each effect.
        """
        if not self.self_fencing or self.group is None or self.group.phase == "succeeded":
            return None
        return self.contact.standstill_boot_s

    @property
    def linked(self) -> bool:
        """Whether there is a session with a coordinator."""
        return self.contact.linked

    def _link(self, offer: PortOffer | None) -> None:
        seen = self._workers.seen
        if offer is not None:
            self._workers.offer_port(offer)
        self.contact.session_started(self._now_s)
        self._probing.ask((), self._now_s)  # This coordinator has asked nothing yet.
        # Sent at once if there are workers. The heartbeat has the world in which they last met;
        # without it a new coordinator does not know that they hold the state.
        pause_s = 0.0 if self.group is not None else self.spec.timing.heartbeat_s
        self._heartbeat_s = self._now_s + pause_s
        self._outbox.send(
            Join(
                spec=self.spec,
                node=self.node,
                offer=self.offer,
                holding=self.group.holding(self._now_s) if self.group else None,
                ready=self.ready,
                welcomed=self.welcomed,
                seen=seen.fence if seen else None,
                restarts_seen=seen.restarts_used if seen else 0,
            )
        )
        if self._leaving is not None:
            self._send_leave(self._leaving)

    def _unlink(self, reason: str) -> None:
        if self.linked and self.outcome is None:  # A coordinator leaves once the job has ended.
            self._log(EventKind.COORDINATOR_AWAY, reason)
        self.contact.session_ended(reason, self._now_s)
        if self._leaving is not None and self.group is None:
            self._leave_now(self._leaving, "the coordinator is away")

    def _warm(self) -> None:
        if not self.ready:
            self.ready = True
            if self.linked:
                self._outbox.send(Ready())

    def _receive(self, message: ToAgent) -> None:
        match message:
            case Welcome(phase=phase, reason=reason):
                self.welcomed = True
                self._log(EventKind.COORDINATOR_FOUND, f"the job is {phase}: {reason}")
            case Refused():
                self._refused(message)
            case Release() | Close():
                self._dismissed(message)
            case Alive(authority=authority, probes=probes):
                self.contact.heartbeat_answered(authority)
                if due := self._probing.ask(probes, self._now_s):
                    self._outbox.add(TryAddresses(due))
            case Report():
                pass
            case _:
                self._workers.receive(message, leaving=self._stage is not AgentStage.TAKING_PART)

    def _refused(self, message: Refused) -> None:
        self.outcome = refused(message)
        self._end(self.outcome.exit_code, message.what)

    def _dismissed(self, message: Release | Close) -> None:
        if isinstance(message, Release):
            self._end(self._left_code(), f"released: {message.reason}")
            return
        self.outcome = message.outcome
        self._end(message.outcome.exit_code, message.outcome.reason)

    def _signalled(self, event: Signalled) -> None:
        name, leaving = event.name, self._leaving
        hurries = leaving is not None and leaving.signalled
        if hurries and event.may_repeat:
            return
        self._log(EventKind.SIGNAL, f"{name}: {'hurrying' if hurries else 'draining'}")
        if hurries:
            self._hurry(name)
        elif leaving is not None:
            # A cloud shuts a node down after its notice, and that sends the first signal.
            self._leaving = replace(leaving, signalled=True)
        else:
            self._leave(Leaving(name, self._now_s, self._drained_by_s(), signalled=True))

    def _noticed(self, notice: Notice) -> None:
        within_s, leaving = notice.within_s, self._leaving
        data: dict[str, str | float | bool] = {"source": notice.source, "drains": notice.drains}
        if within_s is not None:
            data["within_s"] = round(within_s, 3)
        self._log(EventKind.NOTICE, notice.reason, **data)
        if not notice.drains:
            return
        by_s, out_by_s = self._drained_by_s(), None
        if within_s is not None:
            out_by_s = self._now_s + within_s
            by_s = min(by_s, out_by_s - min(NOTICE_MARGIN_S, within_s / 2))
        if leaving is None:
            reason = f"notice of {notice.source}: {notice.reason}"
            self._leave(Leaving(reason, self._now_s, by_s, out_by_s, unfit=notice.unfit))
            return
        self._leaving = leaving = replace(leaving, unfit=leaving.unfit or notice.unfit)
        if out_by_s is not None and out_by_s < (leaving.out_by_s or math.inf):
            self._leaving = leaving.shorten(by_s, out_by_s)
            self._send_leave(self._leaving)

    def _drained_by_s(self) -> float:
        """Return when a drain that begins now must be over, without another deadline."""
        timing = self.spec.timing
        return self._now_s + timing.drain_timeout_s + timing.shutdown_timeout_s + STOP_MARGIN_S

    def _leave(self, leaving: Leaving) -> None:
        """Ask the coordinator to drain this node; without a coordinator, leave at once."""
        self._leaving = leaving
        if self.linked:
            self._send_leave(leaving)
        elif self.group is None:
            self._leave_now(leaving, "no coordinator to tell")
        else:
            grace_s = self.spec.timing.shutdown_timeout_s
            self._workers.stop(self.group, grace_s, f"{leaving.reason}, coordinator away")

    def _send_leave(self, leaving: Leaving) -> None:
        self._outbox.send(Leave(leaving.reason, leaving.within_s(self._now_s)))

    def _gone(self) -> None:
        if self._exit is not None:
            self._leave_with(self._exit)
        elif self._leaving is not None and not self.linked:
            self._leave_now(self._leaving, "the coordinator is away")

    def _hurry(self, name: str) -> None:
        if self.group is not None:
            self._workers.stop(self.group, 0.0, f"a second signal ({name})")
        self._end(self._left_code(), f"a second signal ({name})")

    def _leave_now(self, leaving: Leaving, why: str) -> None:
        self._end(leaving.code, f"{leaving.reason}: {why}")

    def _left_code(self) -> ExitCode:
        return self._leaving.code if self._leaving is not None else ExitCode.DRAINED

    def _end(self, code: int, reason: str) -> None:
        """Exit with `code` once no worker is left."""
        if self._exit is None:
            self._exit = Exit(int(code), reason, self.outcome)
            self._enter(AgentStage.ENDING)
        group = self.group
        if group is None:
            self._leave_with(self._exit)
        elif group.phase != "stopping":
            # After success no worker runs, and the shell answers at once.
            self._workers.stop(group, self.spec.timing.shutdown_timeout_s, reason)

    def _leave_with(self, exit_: Exit) -> None:
        if self._stage is not AgentStage.EXITED:
            self._enter(AgentStage.EXITED)
            self._log(EventKind.AGENT_STOPPED, exit_.reason, exit_code=exit_.code)
            out_by_s = self._leaving.out_by_s if self._leaving is not None else None
            self._outbox.add(msgspec.structs.replace(exit_, out_by_s=out_by_s))

    def _enter(self, stage: AgentStage) -> None:
        self._stage = stage

    def _run_timers(self, readings: Readings) -> None:
        if self._now_s >= self._heartbeat_s:
            self._heartbeat_s = self._now_s + self.spec.timing.heartbeat_s
            fence = self.group.fence if self.group else None
            if self.linked:
                self.contact.heartbeat_sent(self._now_s)
            beat = Heartbeat(
                fence=fence,
                progress=readings.progress,
                met=readings.met,
                waiting=readings.waiting[:WAITING_MAX],
                all_wait=readings.all_wait,
                paces=readings.paces,
                unanswered=readings.unanswered,
                copies=readings.copies,
                probed=self._probing.results,
            )
            self._outbox.send(beat)
        leaving = self._leaving
        if leaving is not None and leaving.by_s is not None and self._now_s >= leaving.by_s:
            self._leaving = replace(leaving, by_s=None)
            if self.group is not None:
                self._workers.stop(self.group, 0.0, "the drain took longer than it may")
            self._end(leaving.code, "the drain took longer than it may")
        self._check_release()
        self._check_isolation()
        self._check_absence(all_wait=readings.all_wait)

    def _check_release(self) -> None:
        """Leave without goodbye when no coordinator with authority remains."""
        leaving = self._leaving
        if leaving is None or self._stage is not AgentStage.TAKING_PART:
            return
        last_authority_s = self.contact.authority_s if self.self_fencing else self._now_s
        last_authority_s = last_authority_s if self.linked else self.contact.away_s
        silent_s = self._now_s - max(last_authority_s, leaving.since_s)
        if silent_s >= LEAVE_ALONE_S:
            self._leave_now(leaving, f"no coordinator with authority for {silent_s:.0f} s")

    def _check_isolation(self) -> None:
        group, since_s = self.group, self.contact.isolated_from_s
        if not self.self_fencing or group is None or self._now_s < since_s:
            return
        if group.phase == "succeeded":
            return  # No worker is left, and their success is still to be reported.
        self._workers.stop(
            group,
            min(self.spec.timing.shutdown_timeout_s, ISOLATION_GRACE_S),
            f"no coordinator with authority for {self._now_s - self.contact.authority_s:.0f} s:"
            " another side of the network may"
            " have continued the job",
            since_s=since_s,
        )

    def _check_absence(self, *, all_wait: bool) -> None:
        """Give up the search for a coordinator, unless there are workers that may make steps.

        `all_wait`: those here wait for others, for ever.
        """
        timing = self.spec.timing
        limit_s = timing.join_timeout_s if self.group is None else timing.lost_wait_s
        is_ending = self._stage is not AgentStage.TAKING_PART
        if self.linked or is_ending or self._now_s - self.contact.away_s < limit_s:
            return
        if self.group is not None and self.group.phase == "succeeded":
            self._end(ExitCode.DONE, "all local workers succeeded, and the coordinator is gone")
        elif all_wait or self.group is None or self.group.makes_no_step:
            self.outcome = not_found(limit_s, self.contact.reason)
            self._end(self.outcome.exit_code, self.outcome.reason)

    def _log(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        fence = self.group.fence if self.group else None
        self._outbox.log(kind, fence, reason, **data)


class LocalWorkers:
    """Decides for one local worker group at a time; `advance` comes before each other call."""

    def __init__(self, node: NodeSpec, offer: PortOffer, contact: Contact, outbox: Outbox) -> None:
        self.node = node
        self.offer = offer
        self.group: Group | None = None
        self.seen: Assignment | None = None
        self.now_s = 0.0
        self._contact = contact
        self._outbox = outbox

    def advance(self, now_s: float) -> None:
        """Decide as of `now_s` from here on."""
        self.now_s = now_s

    def offer_port(self, offer: PortOffer) -> None:
        """Offer another port for the next process-group store."""
        self.offer = offer

    def receive(self, message: ToGroup, *, leaving: bool) -> None:
        """Do what the coordinator orders; `leaving`: this agent starts nothing any more."""
        match message:
            case Assign(assignment=assignment) if assignment.in_place:
                self._regroup(assignment, leaving=leaving)
            case Assign(assignment=assignment):
                self._start(assignment, leaving=leaving)
            case Prepare():
                self._prepare(message, leaving=leaving)
            case Interrupt():
                self._interrupt(message)
            case Stop():
                self._stop(message)
            case Drain():
                self._drain(message)
            case CallOff():
                self._call_off(message)
            case EndWorker() | ShowStacks():
                self._look_into(message)
            case _:
                self._aim(message)

    def _look_into(self, message: EndWorker | ShowStacks) -> None:
        """Do what a finding at a standstill demands, unless its world has ended."""
        if self.group is None or self.group.fence != message.fence:
            return
        if isinstance(message, EndWorker):
            self._outbox.add(EndGroupWorker(message.fence, message.rank, message.reason))
        else:
            self._outbox.add(ShowGroupStacks(message.fence, message.ranks))

    def observe(self, event: AgentEvent) -> None:
        """Handle an event of the group or of one of its workers."""
        group = self.group
        match event:
            case GroupStarted() | GroupTraining() | GroupPaused() if (
                group and event.fence == group.start_fence
            ):
                self._log_progress(group, event)
            case WorkerSucceeded(fence=fence) if group and fence == group.start_fence:
                self._succeeded(group, event)
            case WorkerFailed(fence=fence) if group and fence == group.start_fence:
                self._failed(group, event.failure, event.ended_s)
            case GroupAble(fence=fence) if group and fence == group.start_fence:
                self._able(group, event)
            case GroupWroteCheckpoint(fence=fence) if group and fence == group.start_fence:
                self._outbox.send(Checkpointed(group.fence, event.where, event.resumed))
            case WorkerLost(fence=fence, world=world, reason=reason) if (
                group and fence == group.start_fence and world == group.fence
            ):
                group.interrupt(reason)
                self._outbox.send(Lost(fence=world, reason=reason))
            case (
                ReplicaDiffered()
                | CulpritFound()
                | WorkerStacks()
                | GroupStandstill()
                | GroupCalls()
            ) if group and event.fence == group.start_fence:
                self._found(group, event)
            case GroupMarked() | GroupDrained() if group and self._is_current_drain(event):
                self._drained(group, event)
            case GroupGone() if group is None or event.fence == group.start_fence:
                self._gone(event)
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
        if not group.stop(by_s, self.now_s if since_s is None else since_s, asked=asked):
            return
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
        self.seen = assignment
        self._hold(Group(assignment, assignment.fence))
        self._log(EventKind.WORKERS_STARTING, assignment.reason)
        self._outbox.add(StartGroup(assignment))

    def _has_other_port(self, assignment: Assignment) -> bool:
        """Whether the world would meet at a port of this node that it no longer holds."""
        return assignment.node_rank == 0 and assignment.master_port != self.offer.port

    def _may_act(self) -> bool:
        """Whether the deciding coordinator had authority recently enough."""
        self._contact.decision_received()
        return self.now_s < self._contact.isolated_from_s

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
                group.become("failed")
            failures = group.aged_failures(self.now_s)
            self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _stay_out(self, group: Group, fence: Fence, *, finished: bool) -> None:
        """Adopt the epoch of a world these workers will not join, and report why."""
        group.move(fence)
        if finished:
            self._outbox.send(Succeeded(fence, group.last_steps))
        elif group.phase != "stopping":
            # The order waited in a buffer while this host stood still, so the coordinator must
            # decide again.
            group.interrupt("was given its place too late: its host stood still")
            self._outbox.send(Lost(fence=fence, reason=group.interrupted))

    def _prepare(self, message: Prepare, *, leaving: bool) -> None:
        """Start the workers that are not running; they become standbys beside the current world."""
        group = self.group
        if leaving or (group is None and message.successors):
            return
        if group is None:
            self._hold(Group(message.assignment, message.assignment.fence))
            self._log(EventKind.WORKERS_STARTING, message.assignment.reason)
            self._outbox.add(StartGroup(message.assignment))
            return
        missing = group.ranks_to_replace()
        if missing and group.phase not in ("stopping", "succeeded"):
            self._log(EventKind.WORKERS_STARTING, message.assignment.reason, workers=len(missing))
            self._outbox.add(
                StartWorkers(group.start_fence, missing, message.assignment, message.delay_s)
            )

    def _interrupt(self, message: Interrupt) -> None:
        group, reason = self.group, message.reason
        if group is not None and group.fence == message.fence and group.phase != "stopping":
            self._log(EventKind.WORKERS_INTERRUPTED, reason)
            group.interrupt(reason)
            self._outbox.add(InterruptGroup(group.start_fence, reason, message.asks_calls))

    def _stop(self, message: Stop) -> None:
        group = self.group
        if group is None:
            self._outbox.send(Stopped(message.fence, self.offer))
        elif group.fence <= message.fence:  # This agent may not have received its newest world yet.
            group.move(message.fence)
            if message.asks_calls:
                group.ask_for_calls()
            self.stop(group, message.grace_s, message.reason, asked=True)

    def _drain(self, message: Drain) -> None:
        group, fence, drain = self.group, message.fence, message.drain
        if group is None or group.fence != fence:
            return
        if group.phase != "running":
            self._outbox.send(Marked(fence=fence, drain=drain, calls=None))
            self._outbox.send(Drained(fence=fence, drain=drain))
            return
        if group.draining and group.drain.number != drain:
            self._end_drain(group)  # Its CallOff was lost with a connection.
        if group.drain.has_target:
            # A new coordinator continues the drain of the previous one: the target stays.
            calls = group.drain.calls - 1 if group.drain.calls is not None else None
            self._outbox.send(Marked(fence=fence, drain=drain, calls=calls))
            return
        group.begin_drain(drain)
        self._log(EventKind.WORKERS_DRAINING, "asked to checkpoint before a planned change")
        self._outbox.add(MarkGroup(fence, drain))

    def _aim(self, message: DrainTarget) -> None:
        group = self.group
        if group is None or not self._is_current_drain(message):
            return
        drain = message.drain
        if group.aim(message.calls, stops=message.stops):
            self._outbox.add(AimGroup(group.fence, drain, message.calls, group.drain.stops))
        elif group.drain.stage is DrainStage.REACHED:
            self._outbox.send(Drained(fence=group.fence, drain=drain))

    def _call_off(self, message: CallOff) -> None:
        if self.group is not None and self._is_current_drain(message):
            self._end_drain(self.group)

    def _end_drain(self, group: Group) -> None:
        group.end_drain()
        self._outbox.add(ReleaseGroup(group.fence))

    def _able(self, group: Group, event: GroupAble) -> None:
        self.offer = event.offer
        group.update_recoverable(event, self.node.local_world_size)
        self._outbox.send(
            Able(
                workers=event.workers,
                offer=event.offer,
                fence=group.fence,
                sharding=group.sharding,
                joining=group.joining,
            )
        )

    def _drained(self, group: Group, event: GroupMarked | GroupDrained) -> None:
        if isinstance(event, GroupMarked):
            self._outbox.send(Marked(fence=group.fence, drain=event.drain, calls=event.calls))
        elif group.reach_target(stops=event.stops):
            self._outbox.send(Drained(fence=group.fence, drain=event.drain))

    def _is_current_drain(self, what: DrainTarget | CallOff | GroupMarked | GroupDrained) -> bool:
        """Whether a message or an event belongs to the drain that the workers are in now.

        One of a drain that was called off may come late, when the next drain has begun.
        """
        group = self.group
        if group is None or group.fence != what.fence or not group.draining:
            return False
        return group.drain.number == what.drain

    def _log_progress(
        self, group: Group, event: GroupStarted | GroupTraining | GroupPaused
    ) -> None:
        if isinstance(event, GroupPaused):
            self._log_pause(event)
        elif isinstance(event, GroupStarted):
            pids = event.pids
            self._log(EventKind.WORKERS_STARTED, counted(len(pids), "worker"), pids=str(pids))
        elif event.world == group.fence:
            self._log_first_step(event)

    def _log_first_step(self, event: GroupTraining) -> None:
        data = {"age_s": _age_s(event.trained_s, self.now_s)}
        if event.built_s is not None and event.healed_s is not None:
            data["built_age_s"] = _age_s(event.built_s, self.now_s)
            data["healed_age_s"] = _age_s(event.healed_s, self.now_s)
        self._log(EventKind.WORKERS_TRAINING, "all workers made their first step", **data)

    def _log_pause(self, event: GroupPaused) -> None:
        reason = f"rank 0 was {event.pause.word} for {event.seconds:.1f} s"
        data = {"seconds": round(event.seconds, 3), "age_s": _age_s(event.ended_s, self.now_s)}
        self._log(EventKind.PAUSED, reason, what=event.pause.word, **data)

    def _succeeded(self, group: Group, event: WorkerSucceeded) -> None:
        if group.phase == "stopping":
            return
        group.add_done(event)
        how = exit_text(event.exit_code)
        if event.exit_code:
            how = (
                f"{how}, after its program had ended well on all workers: it counts as exit code 0"
            )
        place = event.local_rank
        rank = {"rank": group.rank_of(place)} if group.has_place(place) else {}
        self._log(EventKind.WORKER_EXITED, how, local_rank=place, **rank)
        if rank:
            end = group.end_of(event, self.now_s)
            self._outbox.send(Returned(fence=group.fence, end=end))
        if group.phase == "running" and group.is_done(self.node.local_world_size):
            group.become("succeeded")
            self._outbox.send(Succeeded(group.fence, group.last_steps))

    def _failed(self, group: Group, failure: Failure, ended_s: float) -> None:
        failure = group.with_ended_peers(failure)
        stopped = group.was_stopped(ended_s)
        data = failure_data(aged(failure, ended_s, self.now_s), stopped=stopped)
        self._log(EventKind.WORKER_EXITED, failure_text(failure), **data)
        if stopped:
            return
        # A worker that failed before the stop may be the first cause of the incident.
        if group.phase != "stopping" and group.has_place(failure.local_rank):
            group.become("failed")
        group.add_failure(failure, ended_s)
        failures = group.aged_failures(self.now_s)
        self._outbox.send(Failed(fence=group.fence, failures=failures))

    def _found(
        self,
        group: Group,
        event: ReplicaDiffered | CulpritFound | WorkerStacks | GroupStandstill | GroupCalls,
    ) -> None:
        if isinstance(event, GroupCalls):
            self._outbox.send(LastCalls(fence=event.world, calls=event.calls))
            return
        if isinstance(event, GroupStandstill):
            if event.world == group.fence:
                self._outbox.send(
                    StandstillReport(
                        fence=group.fence,
                        still_s=event.still_s,
                        evidence=event.evidence,
                        early=event.early,
                    )
                )
            return
        if isinstance(event, CulpritFound):
            data = culprit_data(event.verdict, event.still_s)
            self._log(EventKind.CULPRIT, event.verdict.sentence, **data)
            self._outbox.send(AwaitedWorker(fence=group.fence, sentence=event.verdict.sentence))
            return
        if isinstance(event, WorkerStacks):
            reason = f"stacks of rank {event.rank} (pid {event.pid}), by {event.source}"
            where = {"rank": event.rank, "local_rank": event.local_rank, "pid": event.pid}
            self._log(EventKind.STACKS, reason, source=event.source, stacks=event.text, **where)
            return
        differed: dict[str, str | int | float | bool] = {
            "rank": event.rank,
            "local_rank": event.local_rank,
            "steps": event.steps,
        }
        self._log(EventKind.REPLICA_DIFFERED, event.reason, **differed)

    def _gone(self, event: GroupGone) -> None:
        self.offer = event.offer
        group = self.group
        if group is None:
            self._outbox.send(Stopped(event.fence, event.offer, False, event.use))
            return
        self._hold(None)
        text = "no process of the group is left"
        self._log(EventKind.WORKERS_STOPPED, text, at=str(group.fence))
        unasked = group.stopping is not None and group.stopping.unasked
        calls = event.calls if group.is_asked_for_calls else ()
        self._outbox.send(Stopped(group.fence, event.offer, unasked, event.use, calls))

    def _hold(self, group: Group | None) -> None:
        """Hold a group that starts, or none: no process of the last one is left."""
        self.group = group

    def _log(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        fence = self.group.fence if self.group else None
        self._outbox.log(kind, fence, reason, **data)


def _age_s(then_s: float, now_s: float) -> float:
    return round(max(0.0, now_s - then_s), 4)


class DrainStage(Enum):
    """The stage of a group's drain.

    COUNTED: its workers were asked how many calls they have made. AIMED: the coordinator has set
    the target. REACHED: all workers are there.
    """

    NONE = auto()
    COUNTED = auto()
    AIMED = auto()
    REACHED = auto()


@dataclass(frozen=True, slots=True)
class DrainState:
    """A drain of a group in its current world.

    `number`: that of the last drain, also after its end; 0 before the first one. `calls`: the call
    at which the workers checkpoint; None: they end by SIGTERM. `stops`: the drain ends by stopping
    all workers of the job.
    """

    number: int = 0
    stage: DrainStage = DrainStage.NONE
    calls: int | None = None
    stops: bool = False

    @property
    def has_target(self) -> bool:
        """Whether a coordinator has chosen where the workers checkpoint."""
        return self.stage in (DrainStage.AIMED, DrainStage.REACHED)


@dataclass(frozen=True, slots=True)
class Stopping:
    """A group is being stopped, since `since_s` and until `by_s`.

    `unasked`: without an order of the coordinator.
    """

    since_s: float
    by_s: float
    unasked: bool


@dataclass(slots=True)
class Group:
    """The local worker group that was started with the fence `start_fence`.

    Workers that recover in place enter later worlds, so `fence` may be newer. `recoverable` holds
    the local ranks that can enter another world as they are. Only its own methods change it.
    """

    assignment: Assignment
    start_fence: Fence
    recoverable: tuple[int, ...] = ()
    sharding: Sharding | None = None  # of the training state that the workers hold
    in_place: bool = False  # every worker with a place could recover in place at some time
    joining: Joining = Joining.ANYTIME  # when others can join the world of these
    # local ranks that failed and have a replacement
    replaced: set[int] = field(default_factory=set)
    phase: GroupState = "running"
    interrupted: str = ""  # why its workers were interrupted and wait for another world
    is_asked_for_calls: bool = False  # by the coordinator, for their last collectives
    # The workers that exited with code 0, and how many steps each had shown.
    done: dict[int, int] = field(default_factory=dict)
    failures: dict[int, tuple[float, Failure]] = field(default_factory=dict)
    drain: DrainState = field(default_factory=DrainState)
    stopping: Stopping | None = None  # set exactly while the phase is "stopping"

    @property
    def fence(self) -> Fence:
        """The fence of the current assignment."""
        return self.assignment.fence

    def holding(self, now_s: float) -> Holding:
        """Return what a registering agent reports about this group."""
        return Holding(
            assignment=self.assignment,
            state=self.phase,
            failures=self.aged_failures(now_s),
            draining=self.draining,
            last_drain=self.drain.number,
            able=self.recoverable,
            in_place=self.in_place,
            joining=self.joining,
            sharding=self.sharding,
            halted=self.interrupted,
            renewed=tuple(sorted(self.replaced)),
        )

    @property
    def draining(self) -> bool:
        """Whether the workers were asked to checkpoint in the current world."""
        return self.drain.stage is not DrainStage.NONE

    @property
    def makes_no_step(self) -> bool:
        """Whether its workers wait for what only a coordinator decides."""
        return self.phase == "failed" or self.draining or bool(self.interrupted)

    def become(self, phase: GroupState) -> None:
        """Change the phase; every change passes here, but the begin and the end of the group."""
        self.phase = phase

    def interrupt(self, reason: str) -> None:
        """Record that the workers wait for another world, and why."""
        self.interrupted = reason

    def stop(self, by_s: float, since_s: float, *, asked: bool) -> bool:
        """Record an order to stop; False if an earlier one leaves no more time than this one."""
        before = self.stopping
        if before is not None and by_s >= before.by_s:
            return False
        if before is None:
            self.stopping = Stopping(since_s, by_s, unasked=not asked)
            self.become("stopping")
        else:
            self.stopping = replace(before, by_s=by_s)
        return True

    def ask_for_calls(self) -> None:
        """Record that the coordinator needs the last collectives of the workers."""
        self.is_asked_for_calls = True

    def begin_drain(self, number: int) -> None:
        """Record that the workers are asked to checkpoint, for the drain of this number."""
        if not self.draining:
            self.drain = DrainState(number, DrainStage.COUNTED)

    def end_drain(self) -> None:
        """Record that the drain was called off."""
        self.drain = DrainState(self.drain.number)

    def aim(self, calls: int | None, *, stops: bool) -> bool:
        """Set the target of the drain; False if it stays as it is.

        A target that is set stays, but a drain may be ordered later to stop the workers there.
        """
        if not self.drain.has_target:
            self.drain = DrainState(self.drain.number, DrainStage.AIMED, calls, stops)
            return True
        if stops and not self.drain.stops and self.drain.calls == calls is not None:
            self.drain = replace(self.drain, stage=DrainStage.AIMED, stops=True)
            return True
        return False

    def reach_target(self, *, stops: bool) -> bool:
        """Record that all workers are at the target; False if the drain now has another one."""
        is_reached = stops or not self.drain.stops
        stage = DrainStage.REACHED if is_reached else DrainStage.AIMED
        self.drain = replace(self.drain, stage=stage)
        return is_reached

    def update_recoverable(self, event: GroupAble, local_world_size: int) -> None:
        """Set which workers can enter another world; workers that finished their steps cannot."""
        self.recoverable = event.workers
        self.sharding = event.sharding or self.sharding
        self.joining = event.joining
        places = self.assignment.workers or range(local_world_size)
        self.in_place = self.in_place or {*event.workers}.issuperset(places)

    def move(self, fence: Fence) -> None:
        """Adopt the epoch of a world these workers will not join, so later reports carry it."""
        self.assignment = msgspec.structs.replace(self.assignment, fence=fence)

    def enter(self, assignment: Assignment) -> None:
        """Enter another world; keep only failures that no replacement has answered."""
        self.assignment = assignment
        self.become("running")
        self.interrupted = ""
        self.in_place = True
        self.drain = DrainState()
        dead = {*assignment.workers} - {*self.recoverable}
        self.failures = {
            i: found
            for i, found in self.failures.items()
            if i in dead or (i not in assignment.workers and i not in self.replaced)
        }
        self.replaced &= {*self.failures}

    def ranks_to_replace(self) -> tuple[int, ...]:
        """Return the local ranks that need a replacement now, once for each failure."""
        missing = sorted(set(self.failures) - self.replaced)
        self.replaced.update(missing)
        return tuple(missing)

    def add_done(self, event: WorkerSucceeded) -> None:
        """Record that a worker exited with code 0, and how many steps it had shown."""
        self.done[event.local_rank] = event.steps
        self.recoverable = tuple(i for i in self.recoverable if i != event.local_rank)

    def end_of(self, event: WorkerSucceeded, now_s: float) -> Failure:
        """Return the end of a worker with a place whose program has returned."""
        return Failure(
            local_rank=event.local_rank,
            rank=self.rank_of(event.local_rank),
            pid=event.pid,
            exit_code=0,
            age_s=0.0 if event.ended_s is None else _age_s(event.ended_s, now_s),
            log_file=event.log_file,
            steps=event.steps,
        )

    @property
    def last_steps(self) -> int | None:
        """The least number of steps that a worker had shown when it exited; None if one had not."""
        made = self.done.values()
        return min(made) if made and all(made) else None

    def rank_of(self, local_rank: int) -> int:
        """Return the rank of a worker with a place."""
        return self.assignment.rank_base + self.assignment.index_of(local_rank)

    def with_ended_peers(self, failure: Failure) -> Failure:
        """Return a failure with the workers that had ended well, if it only says that one is gone.

        A script that ends on one rank while the others still train makes the others fail so.
        """
        ended = sorted(self.rank_of(each) for each in self.done if self.has_place(each))
        if not ended or not is_lost_peer(failure):
            return failure
        known = (failure.evidence, f"{ranks_text(ended)} had ended with exit code 0 before")
        return msgspec.structs.replace(failure, evidence="; ".join(filter(None, known)))

    def is_done(self, local_world_size: int) -> bool:
        """Whether every worker with a place exited with code 0."""
        places = self.assignment.workers or range(local_world_size)
        return not self.assignment.waiting and self.done.keys() >= {*places}

    def has_finished(self, workers: tuple[int, ...]) -> bool:
        """Whether `workers`, or all, exited with code 0, and none of them was started after that.

        Another worker of the node may have been lost in that moment: its replacement has no place.
        """
        done = bool(workers) and self.done.keys() >= {*workers}
        return (done or self.phase == "succeeded") and not {*workers} & {*self.recoverable}

    def has_place(self, local_rank: int) -> bool:
        """Whether the worker belongs to the current world of this group."""
        places = self.assignment.workers
        return not self.assignment.waiting and (not places or local_rank in places)

    def was_stopped(self, ended_s: float) -> bool:
        """Whether a worker that ended at `ended_s` was stopped, not failed before that."""
        return self.stopping is not None and ended_s >= self.stopping.since_s

    def add_failure(self, failure: Failure, ended_s: float) -> None:
        """Store `failure` with its time on the own clock, from which its age is computed."""
        if len(self.failures) >= FULL_TEXTS_MAX:
            short = last_lines(failure.message, SHORT_TEXT_CHARS)
            failure = msgspec.structs.replace(failure, message=short, calls=())
        self.replaced.discard(failure.local_rank)
        self.recoverable = tuple(i for i in self.recoverable if i != failure.local_rank)
        if len(self.failures) < FAILURES_MAX or failure.local_rank in self.failures:
            self.failures[failure.local_rank] = (ended_s, failure)

    def aged_failures(self, now_s: float) -> tuple[Failure, ...]:
        """Return the failures with their ages as of `now_s`."""
        return tuple(aged(failure, ended_s, now_s) for ended_s, failure in self.failures.values())


class Contact:
    """The history of the sessions with coordinators, on the agent's own monotonic clock."""

    def __init__(self, now_s: float, timing: Timing) -> None:
        self.linked = False
        self.away_s = now_s
        self.reason = "no search has started yet"
        self.authority_s = now_s
        self._timing = timing
        self._asked_s: deque[float] = deque()
        self._sent_s = now_s
        self._slept_s: float | None = None

    def add_suspension(self, total_s: float) -> None:
        """Age everything proved by the time this host was suspended; `total_s` is the sum so far.

        The monotonic clock stands still during a suspension, while time passes for all other nodes.
        """
        known_s = total_s if self._slept_s is None else self._slept_s
        self._slept_s = max(known_s, total_s)
        suspended_s = self._slept_s - known_s
        if suspended_s:
            self.authority_s -= suspended_s
            self._sent_s -= suspended_s
            self._asked_s = deque(asked_s - suspended_s for asked_s in self._asked_s)

    @property
    def isolated_from_s(self) -> float:
        """From when another side of the network may train, unless authority is proved before."""
        return self.authority_s + self._timing.isolation_limit_s

    @property
    def standstill_boot_s(self) -> float:
        """When a stopped agent's workers are killed, in seconds of this host's CLOCK_BOOTTIME."""
        return self.authority_s + (self._slept_s or 0.0) + self._timing.standstill_limit_s

    def session_started(self, now_s: float) -> None:
        """Record a new session; every message on it is sent from now on."""
        self.linked = True
        self._sent_s = now_s
        self._asked_s.clear()

    def session_ended(self, reason: str, now_s: float) -> None:
        """Record that there is no session, and why."""
        if self.linked:
            self.away_s = now_s
        self.linked = False
        self.reason = reason

    def heartbeat_sent(self, now_s: float) -> None:
        """Record that a heartbeat was sent."""
        self._asked_s.append(now_s)

    def heartbeat_answered(self, authority: bool) -> None:
        """Record the answer to the oldest heartbeat, given with or without authority."""
        if self._asked_s:
            self._sent_s = self._asked_s.popleft()
        if authority:
            self.decision_received()

    def decision_received(self) -> None:
        """Record a decision: the coordinator had authority when it sent it."""
        self.authority_s = max(self.authority_s, self._sent_s)


class Probing:
    """Which addresses the coordinator wants this agent to try, and what was found.

    They are tried one set after the other, each PROBE_EVERY_S after the last, whatever is asked.
    """

    def __init__(self) -> None:
        self.results: tuple[ProbeResult, ...] = ()
        self._asked: tuple[Probe, ...] = ()
        self._is_under_way = False
        self._due_s = -math.inf

    def ask(self, probes: tuple[Probe, ...], now_s: float) -> tuple[Probe, ...]:
        """Take the coordinator's newest list, and return what is to be tried now."""
        self._asked = probes
        self._keep(self.results)
        if not probes or self._is_under_way or now_s < self._due_s:
            return ()
        self._is_under_way, self._due_s = True, now_s + PROBE_EVERY_S
        return probes

    def end(self, results: tuple[ProbeResult, ...]) -> None:
        """Record what the last set found, as far as it is still asked for."""
        self._is_under_way = False
        self._keep(results)

    def _keep(self, results: tuple[ProbeResult, ...]) -> None:
        asked = {(each.address, each.number) for each in self._asked}  # a port may change
        self.results = tuple(
            each for each in results if (each.probe.address, each.probe.number) in asked
        )


class Outbox:
    """The effects collected so far."""

    def __init__(self, node_id: str, contact: Contact) -> None:
        self._node_id = node_id
        self._contact = contact
        self._effects: list[AgentEffect] = []

    def add(self, effect: AgentEffect) -> None:
        """Add `effect`."""
        self._effects.append(effect)

    def send(self, message: ToCoordinator) -> None:
        """Send `message` to the coordinator.

        Dropped without a session: the agent reports its state when it registers again.
        """
        if self._contact.linked:
            self._effects.append(Transmit(message))

    def log(
        self, kind: EventKind, fence: Fence | None, reason: str, **data: str | int | float | bool
    ) -> None:
        """Write an event to the event log."""
        event = LogEvent(kind=kind, reason=reason, node_id=self._node_id, fence=fence, data=data)
        self._effects.append(WriteEvent(event))

    def pop(self) -> list[AgentEffect]:
        """Return the collected effects and start a new collection."""
        effects = self._effects
        self._effects = []
        return effects


def refused(message: Refused) -> Outcome:
    """Return the outcome for an agent that the coordinator refused.

    A fenced node is not at fault, so its exit code asks the process that started it to try again.
    """
    return Outcome(
        ok=False,
        reason=message.what,
        slug=message.slug,
        exit_code=ExitCode.TRY_AGAIN if message.slug == "node-fenced" else ExitCode.CONFIGURATION,
        next_step=message.next_step,
    )


def not_found(limit_s: float, reason: str) -> Outcome:
    """Return the outcome for an agent that found no coordinator in time."""
    return Outcome(
        ok=False,
        reason=f"no coordinator was found within {limit_s:g} s: {reason}",
        slug="no-coordinator",
        exit_code=ExitCode.TRY_AGAIN,
        next_step="check --rdzv-endpoint, and that an agent runs on that host",
    )


def aged(failure: Failure, ended_s: float, now_s: float) -> Failure:
    """Return `failure` with its age as of `now_s`."""
    return msgspec.structs.replace(failure, age_s=max(0.0, now_s - ended_s))


def failure_data(failure: Failure, *, stopped: bool) -> dict[str, str | int | float | bool]:
    """Return the fields that the event log keeps about a worker's end."""
    return {
        "local_rank": failure.local_rank,
        "rank": failure.rank,
        "pid": failure.pid,
        "exit_code": failure.exit_code,
        "age_s": round(failure.age_s, 6),
        "stopped": stopped,
        "message": last_lines(failure.message, EVENT_TEXT_CHARS),
        "output": failure.output,
        "error_file": failure.error_file,
        "log_file": failure.log_file,
    }
