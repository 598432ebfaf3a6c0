"""The agent's decisions: a coordinator that may come and go, and when this agent leaves.

The agent keeps no queue of unacknowledged messages. After each break of the connection it registers
again and reports what it has, so nothing is lost and nothing is reported twice. Healthy workers
keep training while the coordinator is away.
"""

from __future__ import annotations

from elastane.agent.rules.contact import Contact, not_found, refused
from elastane.agent.rules.group import Group
from elastane.agent.rules.local_workers import LocalWorkers
from elastane.agent.rules.outbox import Outbox
from elastane.errors import ExitCode
from elastane.protocol.effects import AgentEffect, Exit
from elastane.protocol.events import (
    AgentEvent,
    GroupGone,
    Linked,
    MessageReceived,
    Signalled,
    Tick,
    Unlinked,
    Warm,
)
from elastane.protocol.limits import (
    ISOLATION_GRACE_S,
    ISOLATION_LIMIT_S,
    LEAVE_ALONE_S,
    STANDSTILL_LIMIT_S,
    STOP_MARGIN_S,
    WAITING_MAX,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Alive,
    Close,
    Heartbeat,
    Join,
    Leave,
    Ready,
    Refused,
    Release,
    Report,
    ToAgent,
    Welcome,
)
from elastane.protocol.model import JobSpec, NodeSpec, Outcome, PortOffer, WaitPoint


class AgentCore:
    """Decides for one agent; `handle` takes an event and returns effects.

    `self_fencing`: whether the agent must stop its workers after ISOLATION_LIMIT_S without contact
    to a coordinator with authority. It is set for jobs with a store, where another coordinator may
    be elected.
    """

    def __init__(
        self, spec: JobSpec, node: NodeSpec, offer: PortOffer, now_s: float, *, self_fencing: bool
    ) -> None:
        self.spec, self.node = spec, node
        self.self_fencing = self_fencing
        self.ready = False
        self.contact = Contact(now_s)
        self.outcome: Outcome | None = None
        self.progress: int | None = None
        self.met = 0
        self.slept_s = 0.0  # how long this host was suspended; the monotonic clock omits it
        self.waiting: tuple[WaitPoint, ...] = ()
        self.all_wait = False
        self._now_s = now_s
        self.welcomed = False
        self._heartbeat_s = now_s
        self._leaving = ""
        self._leaving_s = 0.0
        self._leave_by_s: float | None = None
        self._exit: Exit | None = None
        self._exited = False
        self._outbox = Outbox(node.node_id, self.contact)
        self._workers = LocalWorkers(node, offer, self.contact, self._outbox)

    def handle(self, event: AgentEvent, now_s: float) -> list[AgentEffect]:
        """Handle `event` at `now_s` (monotonic seconds) and return the effects."""
        self._now_s = self._workers.now_s = now_s
        self.contact.add_suspension(self.slept_s)
        match event:
            case Linked(offer=offer):
                self._link(offer)
            case Unlinked(reason=reason):
                self._unlink(reason)
            case MessageReceived(message=message):
                self._receive(message)
            case Warm():
                self._warm()
            case Signalled(name=name):
                self._signalled(name)
            case Tick():
                pass
            case _:
                # If this agent itself stood still, workers that the orphan reaper killed did not
                # fail.
                self._check_isolation()
                self._workers.observe(event)
                if isinstance(event, GroupGone) and self.group is None:
                    self._gone()
        self._run_timers()
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
            due = min(due, self.contact.authority_s + ISOLATION_LIMIT_S)
        if self._leave_by_s is not None:
            due = min(due, self._leave_by_s)
        return max(due, self._now_s)

    @property
    def train_until_s(self) -> float | None:
        """Until when workers may train if this agent stands still, by CLOCK_BOOTTIME.

        None: no bound, or no workers. The shell passes it on before each effect.
        """
        if not self.self_fencing or self.group is None or self.group.phase == "succeeded":
            return None
        return self.contact.authority_boot_s + STANDSTILL_LIMIT_S

    @property
    def linked(self) -> bool:
        """Whether there is a session with a coordinator."""
        return self.contact.linked

    def _link(self, offer: PortOffer | None) -> None:
        seen = self._workers.seen
        if offer is not None:
            self._workers.offer = offer
        self.contact.session_started(self._now_s)
        self._heartbeat_s = self._now_s + self.spec.timing.heartbeat_s
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
        if self._leaving:
            self._outbox.send(Leave(self._leaving))

    def _unlink(self, reason: str) -> None:
        if self.linked and self.outcome is None:  # A coordinator leaves once the job has ended.
            self._log(EventKind.COORDINATOR_AWAY, reason)
        self.contact.session_ended(reason, self._now_s)
        if self._leaving and self.group is None:
            self._leave_now("the coordinator is away")

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
            case Alive(authority=authority):
                self.contact.heartbeat_answered(authority)
            case Report():
                pass
            case _:
                self._workers.receive(message, leaving=self._exit is not None)

    def _refused(self, message: Refused) -> None:
        self.outcome = refused(message)
        self._end(self.outcome.exit_code, message.what)

    def _dismissed(self, message: Release | Close) -> None:
        if isinstance(message, Release):
            self._end(ExitCode.DRAINED, f"released: {message.reason}")
            return
        self.outcome = message.outcome
        self._end(message.outcome.exit_code, message.outcome.reason)

    def _signalled(self, name: str) -> None:
        self._log(EventKind.SIGNAL, f"{name}: {'hurrying' if self._leaving else 'draining'}")
        if self._leaving:
            self._hurry(name)
            return
        self._leaving, self._leaving_s = name, self._now_s
        timing = self.spec.timing
        wait_s = timing.drain_timeout_s + timing.shutdown_timeout_s + STOP_MARGIN_S
        self._leave_by_s = self._now_s + wait_s
        if self.linked:
            self._outbox.send(Leave(name))
        elif self.group is None:
            self._leave_now("no coordinator to tell")
        else:
            self._workers.stop(self.group, timing.shutdown_timeout_s, f"{name}, coordinator away")

    def _gone(self) -> None:
        if self._exit is not None:
            self._leave_with(self._exit)
        elif self._leaving and not self.linked:
            self._leave_now("the coordinator is away")

    def _hurry(self, name: str) -> None:
        if self.group is not None:
            self._workers.stop(self.group, 0.0, f"a second signal ({name})")
        self._end(ExitCode.DRAINED, f"a second signal ({name})")

    def _leave_now(self, why: str) -> None:
        self._end(ExitCode.DRAINED, f"{self._leaving}: {why}")

    def _end(self, code: int, reason: str) -> None:
        """Exit with `code` once no worker is left."""
        if self._exit is None:
            self._exit = Exit(int(code), reason, self.outcome)
        group = self.group
        if group is None:
            self._leave_with(self._exit)
        elif group.phase != "stopping":
            # After success no worker runs, and the shell answers at once.
            self._workers.stop(group, self.spec.timing.shutdown_timeout_s, reason)

    def _leave_with(self, exit_: Exit) -> None:
        if not self._exited:
            self._exited = True
            self._log(EventKind.AGENT_STOPPED, exit_.reason, exit_code=exit_.code)
            self._outbox.add(exit_)

    def _run_timers(self) -> None:
        if self._now_s >= self._heartbeat_s:
            self._heartbeat_s = self._now_s + self.spec.timing.heartbeat_s
            fence = self.group.fence if self.group else None
            if self.linked:
                self.contact.heartbeat_sent(self._now_s)
            beat = Heartbeat(
                fence=fence,
                progress=self.progress,
                met=self.met,
                waiting=self.waiting[:WAITING_MAX],
                all_wait=self.all_wait,
            )
            self._outbox.send(beat)
        if self._leave_by_s is not None and self._now_s >= self._leave_by_s:
            self._leave_by_s = None
            if self.group is not None:
                self._workers.stop(self.group, 0.0, "the drain took longer than it may")
            self._end(ExitCode.DRAINED, "the drain took longer than it may")
        self._check_release()
        self._check_isolation()
        self._check_absence()

    def _check_release(self) -> None:
        """Leave without goodbye when no coordinator with authority remains."""
        if not self._leaving or self._exit is not None:
            return
        last_authority_s = self.contact.authority_s if self.self_fencing else self._now_s
        last_authority_s = last_authority_s if self.linked else self.contact.away_s
        silent_s = self._now_s - max(last_authority_s, self._leaving_s)
        if silent_s >= LEAVE_ALONE_S:
            self._leave_now(f"no coordinator with authority for {silent_s:.0f} s")

    def _check_isolation(self) -> None:
        away_s = self._now_s - self.contact.authority_s
        group = self.group
        if not self.self_fencing or group is None or away_s < ISOLATION_LIMIT_S:
            return
        if group.phase == "succeeded":
            return  # No worker is left, and their success is still to be reported.
        self._workers.stop(
            group,
            min(self.spec.timing.shutdown_timeout_s, ISOLATION_GRACE_S),
            f"no coordinator with authority for {away_s:.0f} s: another side of the network may"
            " have continued the job",
            since_s=self.contact.authority_s + ISOLATION_LIMIT_S,
        )

    def _check_absence(self) -> None:
        """Give up the search for a coordinator, unless there are workers to keep running."""
        limit_s = self.spec.timing.join_timeout_s
        if self.linked or self._exit is not None or self._now_s - self.contact.away_s < limit_s:
            return
        if self.group is not None and self.group.phase == "succeeded":
            self._end(ExitCode.DONE, "all local workers succeeded, and the coordinator is gone")
        elif self.group is None or self.group.phase == "failed" or self.group.draining:
            self.outcome = not_found(limit_s, self.contact.reason)
            self._end(self.outcome.exit_code, self.outcome.reason)

    def _log(self, kind: EventKind, reason: str, **data: str | int | float | bool) -> None:
        self._outbox.fence = self.group.fence if self.group else None
        self._outbox.log(kind, reason, **data)
