"""The shell of a simulated coordinator: effects in order, durable first.

It keeps the obligations of `protocol.effects`: nothing after a Persist is done before the store has
it, and events wait meanwhile. Its clock stands still while its host does, and while it waits for
the store, as in `coordinator.clock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from elastane.coordinator.rules import MembershipPhase, Rendezvous, StepDowns, Takeover
from elastane.protocol.effects import Finished, Hangup, Persist, RendezvousEffect, Send, WriteEvent
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
    Tick,
)
from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import Leave, ToAgent, ToCoordinator
from elastane.protocol.model import JobRecord, JobSpec
from simulation.checks import Checks
from simulation.clock import HostClock, Timer, VirtualClock
from simulation.crash_points import EffectGap, coordinator_step
from simulation.election import SimulatedElection
from simulation.name_checks import NameCheck
from simulation.network import SimulatedSession
from simulation.story import Story

# Time between two readings of the clock counts for no more than this (coordinator.clock).
_STEP_MAX_S = 0.75
# How often it checks whether it has too few nodes (coordinator.leadership does each 0.2 s).
_NODES_CHECK_S = 0.5


class CoordinatorSurroundings(Protocol):
    """What a coordinator reads of its cluster and asks it to do: see `cluster.SimulatedCluster`."""

    spec: JobSpec
    clock: VirtualClock
    story: Story
    checks: Checks
    coordinators_started: int
    wanted: Resized | None
    given_up: tuple[str, ...]
    dead: tuple[str, ...]

    def on_host(self, host: str, act: Callable[[], None]) -> None:
        """Do `act` on a host: later, while it is paused."""

    def dies_at(self, host: str, step: EffectGap) -> bool:
        """Whether a planned death at this crash point kills the process on `host`."""

    def send_down(self, session: SimulatedSession, message: ToAgent) -> None:
        """Carry a message of a coordinator."""

    def close_from_coordinator(self, session: SimulatedSession, reason: str) -> None:
        """End a session from the coordinator's side."""

    def step_downs(self, host: str) -> StepDowns:
        """Return how often the coordinators of a host stepped down."""

    def steps_down(self, host: str) -> None:
        """Let other nodes stand first, since too few reach the coordinator on `host`."""

    def coordinator_ended(self, coordinator: SimulatedCoordinator) -> None:
        """Forget a coordinator."""

    def note(self, host: str, event: LogEvent) -> None:
        """Add an event to the story."""


class SimulatedCoordinator:
    """One coordinator on the host of one node; `election` is its own, in a job with a store."""

    def __init__(
        self,
        cluster: CoordinatorSurroundings,
        host: str,
        clock: HostClock,
        election: SimulatedElection | None,
    ) -> None:
        self.cluster, self.host, self.election = cluster, host, election
        self.alive = True
        self.finished = False
        self._clock = clock
        self._lost_s = 0.0
        record = election.filed.record if election else None
        world = record.world.fence if record and record.world else None
        takeover = Takeover(
            record,
            election.previous_holder if election else "",
            store_backed=election is not None,
            previous_refuses=election is not None and election.previous_refuses,
            waited_s=cluster.step_downs(host).waited_s(world, clock.now_s),
        )
        self.machine = Rendezvous(cluster.spec, self.now_s, takeover)
        self._changes: deque[RendezvousEvent] = deque()
        self._events: deque[RendezvousEvent] = deque()
        self._record: JobRecord | None = None
        self._busy = False
        self._tick: Timer | None = None
        self.sessions: dict[int, SimulatedSession] = {}
        self.leaving: set[int] = set()  # sessions whose agents asked to leave
        self.names = NameCheck(cluster.spec.timing.silence_s)
        if election is not None:
            election.on_authority = self._authority
            election.on_lost = lambda why: self.end(why, clean=True)
            election.publish()
            election.keep()
            self._clock.after(_NODES_CHECK_S, self._mind_nodes)
        cluster.coordinators_started += 1
        # The list of fenced agents is read before any agent is admitted.
        self.fenced = frozenset[str]()
        if cluster.given_up or cluster.dead:
            self.take(Fenced(cluster.given_up, cluster.dead))
        # The owner's range is read first.
        cluster.clock.after(0.05, lambda: self.take(cluster.wanted) if cluster.wanted else None)
        self._schedule()

    @property
    def now_s(self) -> float:
        """The coordinator's time, by its host's clock less what it stood still."""
        return self._clock.now_s - self._lost_s

    @property
    def is_elected(self) -> bool:
        """Whether the job has a store, in which this coordinator took the lease."""
        return self.election is not None

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended, durably, and its agents are being informed."""
        return (
            self.machine.phase in (MembershipPhase.CLOSING, MembershipPhase.CLOSED)
            and not self._busy
        )

    def stood_still(self, for_s: float) -> None:
        """Skip time in which this process received nothing: it does not count."""
        if not self._busy:  # otherwise it is counted when the record is saved
            self._lost_s += max(0.0, for_s - _STEP_MAX_S)

    def welcome(self, session: SimulatedSession) -> None:
        """Add a newly authenticated session."""
        self.sessions[session.number] = session

    def hear(self, session: SimulatedSession, message: ToCoordinator) -> None:
        """Queue a message."""
        if self.alive and session.number in self.sessions:
            self.take(
                Received(
                    session=session.number,
                    message=message,
                    peer_host=session.up.source,
                    local_host=self.host,
                )
            )

    def lose(self, session: SimulatedSession, reason: str, clean: bool) -> None:
        """Queue the end of a session by its peer."""
        if self.sessions.pop(session.number, None) is not None:
            self.take(Broken(session.number, reason, clean=clean))

    def take(self, event: RendezvousEvent) -> None:
        """Handle an event as soon as the host runs and nothing is being made durable."""
        self.cluster.on_host(self.host, lambda: self._take(event))

    def end(self, why: str, *, clean: bool, tells: bool = True) -> None:
        """End the coordinator; `tells`: the kernel closes its sessions."""
        if not self.alive:
            return
        self.alive = False
        self.cluster.story.tell(f"coordinator on {self.host} ends: {why}")
        sessions, self.sessions = self.sessions, {}
        if tells:
            for session in sessions.values():
                self.cluster.close_from_coordinator(session, why)
        if clean and self.election is not None:
            self.election.resign()
        self.cluster.coordinator_ended(self)

    def _take(self, event: RendezvousEvent) -> None:
        if not self.alive:
            return
        self._events.append(event)
        self._work()

    def _mind_nodes(self) -> None:
        """Step down where there have been too few nodes for long: see `coordinator.leadership`."""
        if not self.alive:
            return
        world, short_s = self.machine.last_fence, self.machine.short_of_nodes_s
        step_downs = self.cluster.step_downs(self.host)
        if step_downs.is_due(world, short_s):
            step_downs.note(world, short_s, self._clock.now_s)
            self.cluster.steps_down(self.host)
            self.end("too few nodes reach it", clean=True)
        else:
            self._clock.after(
                _NODES_CHECK_S, lambda: self.cluster.on_host(self.host, self._mind_nodes)
            )

    def _authority(self, held: bool, reason: str) -> None:
        """Deliver a change of authority, ahead of queued events."""
        if self.alive:
            self._changes.append(AuthorityChanged(held, reason))
            self._work()

    def _work(self) -> None:
        while (self._changes or self._events) and not self._busy and self.alive:
            self._handle((self._changes or self._events).popleft())
        self._schedule()

    def _handle(self, event: RendezvousEvent) -> None:
        if isinstance(event, Received) and isinstance(event.message, Leave):
            self.leaving.add(event.session)
        if isinstance(event, Fenced):
            self.fenced = frozenset(event.incarnations)
        self.names.handles(event, self.now_s)
        self._carry_out(deque(self.machine.handle(event, self.now_s)), None)

    def _carry_out(self, effects: deque[RendezvousEffect], done: RendezvousEffect | None) -> None:
        while self.alive:
            due = effects[0] if effects else None
            if self.cluster.dies_at(self.host, coordinator_step(done, due)) or due is None:
                return
            effects.popleft()
            if isinstance(due, Persist) and self.election is not None:
                self._persist(self.election, due, effects)
                return
            self._do(due)
            done = due

    def _do(self, effect: RendezvousEffect) -> None:
        match effect:
            case Persist(record=record):
                self.cluster.checks.wrote(self._record, record, durable=False)
                self._record = record
            case Send():
                self._send(effect)
            case Hangup(session=number, reason=reason):
                session = self.sessions.pop(number, None)
                if session is not None:
                    self.cluster.close_from_coordinator(session, reason)
            case WriteEvent(event=event):
                self.names.writes(effect)
                self.cluster.note(self.host, event)
            case Finished():
                self.finished = True
                self.end("the job has ended", clean=True)

    def _send(self, effect: Send) -> None:
        session = self.sessions.get(effect.session)
        self.cluster.checks.sends(self, effect.session, effect.message)
        if session is not None:
            self.cluster.send_down(session, effect.message)

    def _persist(
        self, election: SimulatedElection, due: Persist, rest: deque[RendezvousEffect]
    ) -> None:
        self._busy, began_s = True, self._clock.now_s

        def saved(trouble: str) -> None:
            if not self.alive:
                return
            if trouble:
                self.end(trouble, clean=True)
                return
            self._busy = False
            self.stood_still(self._clock.now_s - began_s)
            self._carry_out(rest, due)
            self._work()

        self._save(election, due.record, saved)

    def _save(
        self, election: SimulatedElection, record: JobRecord, saved: Callable[[str], None]
    ) -> None:
        election.save(record, saved)

    def _schedule(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if not self.alive or self._busy:
            return
        wake_s = self.machine.wake_s
        if wake_s is not None:
            delay_s = max(0.0, wake_s - self.now_s)
            self._tick = self._clock.after(delay_s, lambda: self.take(Tick()))
