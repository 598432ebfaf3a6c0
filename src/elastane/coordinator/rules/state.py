"""The coordinator's state: the parts that it is composed of, and the effects of one call.

Each part is changed by its own methods only. The parts know nothing of each other; the rules read
all of them. `phase` and `world` are read nearly everywhere, so they have short names here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from elastane.coordinator.rules.changes import (
    ArrivalGathering,
    CurrentDrain,
    JoiningTries,
    LeftOut,
    OwnerOrders,
    WaitingCapacity,
)
from elastane.coordinator.rules.incident import Incidents, RestartBudget
from elastane.coordinator.rules.nodes import KnownNode, LoggedProgress, Roster, StragglerWatch
from elastane.coordinator.rules.state_holders import StateHolders
from elastane.coordinator.rules.worlds import InPlaceRecovery, WorldHistory
from elastane.protocol.effects import Hangup, Persist, RendezvousEffect, Send, WriteEvent
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import Stop, ToAgent
from elastane.protocol.model import Fence, JobRecord, JobSpec, Outcome, World


class MembershipPhase(StrEnum):
    """The phases of a job's membership; `machine` has the rule of each."""

    RECOVERING = "recovering"  # a new coordinator waits for the agents of the last world
    FORMING = "forming"  # there is no current world; nodes for the next one are gathered
    RUNNING = "running"
    DRAINING = "draining"  # workers stop at one step and checkpoint before a planned change
    REGROUPING = "regrouping"  # interrupted workers keep their state and wait for the next world
    STOPPING = "stopping"  # all workers of the world are being stopped
    CLOSING = "closing"  # the job has ended; agents are being informed
    CLOSED = "closed"


@dataclass(slots=True)
class Stage:
    """The current phase, why it was entered, and when."""

    began_s: float
    phase: MembershipPhase = MembershipPhase.FORMING
    reason: str = "the job begins"

    def enter(self, phase: MembershipPhase, reason: str, now_s: float) -> None:
        """Begin `phase`."""
        self.phase, self.reason, self.began_s = phase, reason, now_s

    def explain(self, reason: str) -> bool:
        """Say what the phase waits for now; return whether that is new."""
        before, self.reason = self.reason, reason
        return reason != before

    def assume_running(self) -> None:
        """Treat the next events as those of the current world, which the caller then ends."""
        self.phase = MembershipPhase.RUNNING

    def restart(self, now_s: float) -> None:
        """Count the time of the phase from `now_s`."""
        self.began_s = now_s


@dataclass(slots=True)
class EffectQueue:
    """The effects of one call in their order, and when the next tick is needed."""

    effects: list[RendezvousEffect] = field(default_factory=list)
    wake_s: float | None = None

    def add(self, *effects: RendezvousEffect) -> None:
        """Append `effects`."""
        self.effects += effects

    def pop(self) -> list[RendezvousEffect]:
        """Return all effects, and begin the next call."""
        effects, self.effects = self.effects, []
        return effects

    def send(self, node: KnownNode, message: ToAgent) -> None:
        """Send to `node`; if its session is broken, the next Join makes up for what it missed."""
        if node.session is not None:
            self.add(Send(node.session, message))

    def hang_up(self, session: int, message: ToAgent, reason: str) -> None:
        """Send a last message to a session, and end it."""
        self.add(Send(session, message), Hangup(session, reason))

    def wait_until(self, deadline_s: float) -> None:
        """Request a tick at `deadline_s`, unless an earlier one is due."""
        if self.wake_s is None or deadline_s < self.wake_s:
            self.wake_s = deadline_s

    def is_due(self, now_s: float) -> bool:
        """Whether the requested tick is due."""
        return self.wake_s is not None and now_s >= self.wake_s

    def forget_wake(self) -> None:
        """Forget the requested tick: the rules run now, and ask for the next one."""
        self.wake_s = None


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a coordinator starts from: the job's record, and what is known of its predecessor.

    `previous_holder` is the node whose coordinator wrote the record last, if that coordinator is
    known to have ended; `previous_refuses`: its address refuses connections, so its agent has ended
    too. `waited_s` counts against join_timeout until the next world: former coordinators of this
    node had too few nodes for that long.
    """

    record: JobRecord | None = None
    previous_holder: str = ""
    store_backed: bool = False
    previous_refuses: bool = False
    waited_s: float = 0.0


# What the first coordinator of a job without a store starts from.
NO_PREDECESSOR = Takeover()


@dataclass(slots=True)
class CoordinatorTerm:
    """The time of one coordinator: since when it decides, and what it knows of the previous one."""

    started_s: float
    store_backed: bool
    # The node of the previous coordinator, known to have ended.
    previous_node: str = ""
    previous_refuses: bool = False  # that coordinator's address refuses connections
    # For how long former coordinators of this node had too few nodes; 0 once a world has followed.
    waited_s: float = 0.0
    previous_due_s: float | None = None  # until when to wait for it, once all others are back
    ended_before: bool = False  # the job ended under another coordinator: its agents may still come
    has_authority: bool = True  # the store backs the decisions

    @classmethod
    def of(cls, takeover: Takeover, now_s: float) -> CoordinatorTerm:
        """Return the term that begins now."""
        return cls(
            now_s,
            takeover.store_backed,
            takeover.previous_holder,
            takeover.previous_refuses,
            takeover.waited_s,
        )

    def await_previous(self, until_s: float) -> float:
        """Return until when to wait for the previous coordinator's node; the first call decides."""
        if self.previous_due_s is None:
            self.previous_due_s = until_s
        return self.previous_due_s

    def note_world(self) -> None:
        """Record that a world was committed: enough nodes are here."""
        self.waited_s = 0.0

    def note_ended_before(self) -> None:
        """Record that the job has ended under a previous coordinator."""
        self.ended_before = True

    def set_authority(self, *, held: bool) -> bool:
        """Record whether the store backs the decisions; return whether that is new."""
        changed = held != self.has_authority
        self.has_authority = held
        return changed


@dataclass(slots=True)
class JobEnding:
    """How the job ended, and how an agent asked to end it."""

    outcome: Outcome | None = None
    requested: Outcome | None = None  # final once it is `outcome`

    def request(self, outcome: Outcome) -> None:
        """Record that an agent asks to end the job; the first request counts."""
        self.requested = self.requested or outcome

    def close(self, outcome: Outcome | None) -> None:
        """Record how the job ended."""
        self.outcome = outcome


@dataclass(slots=True)
class State:
    """All that the coordinator knows."""

    spec: JobSpec
    now_s: float
    term: CoordinatorTerm
    budget: RestartBudget
    stage: Stage
    holders: StateHolders
    growth: WaitingCapacity
    roster: Roster = field(default_factory=Roster)
    worlds: WorldHistory = field(default_factory=WorldHistory)
    in_place: InPlaceRecovery = field(default_factory=InPlaceRecovery)
    incidents: Incidents = field(default_factory=Incidents)
    drain: CurrentDrain = field(default_factory=CurrentDrain)
    progress: LoggedProgress = field(default_factory=LoggedProgress)
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    gathering: ArrivalGathering = field(default_factory=ArrivalGathering)
    joining_tries: JoiningTries = field(default_factory=JoiningTries)
    left_out: LeftOut = field(default_factory=LeftOut)
    owner: OwnerOrders = field(default_factory=OwnerOrders)
    ending: JobEnding = field(default_factory=JobEnding)
    queue: EffectQueue = field(default_factory=EffectQueue)

    @property
    def phase(self) -> MembershipPhase:
        """The current phase."""
        return self.stage.phase

    @property
    def world(self) -> World | None:
        """The current world, or the last one."""
        return self.worlds.current

    @property
    def join_left_s(self) -> float:
        """How long this coordinator waits for nodes at most, before it ends the job."""
        return max(0.0, self.join_limit_s - self.term.waited_s)

    @property
    def join_limit_s(self) -> float:
        """How long the job waits for nodes, under this and former coordinators."""
        timing = self.spec.timing
        # Agents of a new run that find the record of an earlier one have still to start.
        has_trained = self.worlds.began_s or self.term.waited_s
        return timing.lost_wait_s if has_trained else timing.join_timeout_s

    def advance(self, now_s: float) -> None:
        """Record the time of the next event."""
        self.now_s = now_s

    def resize(self, fewest: int, most: int) -> None:
        """Change the job's range of nodes."""
        self.spec = msgspec.structs.replace(self.spec, min_nodes=fewest, max_nodes=most)

    def enter(self, phase: MembershipPhase, reason: str) -> None:
        """Begin `phase` now."""
        self.stage.enter(phase, reason, self.now_s)

    def stop(self, node: KnownNode, fence: Fence, reason: str, *, asks_calls: bool = False) -> None:
        """Ask `node` to stop the workers of `fence`.

        `asks_calls`: also ask for the last collectives of these workers.
        """
        grace_s = self.spec.timing.shutdown_timeout_s
        self.queue.send(
            node, Stop(fence=fence, grace_s=grace_s, reason=reason, asks_calls=asks_calls)
        )

    def log(
        self, kind: EventKind, reason: str, node_id: str = "", /, **data: str | int | float | bool
    ) -> None:
        """Write an event that carries the current fence."""
        fence = self.world.fence if self.world else None
        event = LogEvent(kind=kind, reason=reason, node_id=node_id, fence=fence, data=data)
        self.queue.add(WriteEvent(event))

    def log_of(
        self, fence: Fence, kind: EventKind, reason: str, /, **data: str | int | float | bool
    ) -> None:
        """Write an event about an earlier world, that of `fence`."""
        self.queue.add(WriteEvent(LogEvent(kind=kind, reason=reason, fence=fence, data=data)))

    def persist(self) -> None:
        """Make the record durable before anything that this call sends afterwards."""
        record = JobRecord(
            spec=self.spec,
            versions=self.roster.versions,
            world=self.world,
            restarts_used=self.budget.used,
            outcome=self.ending.outcome,
            resized=self.owner.resized,
            kept=tuple(self.holders.displaced),
            over=self.worlds.all_released,
            charged=self.budget.charged,
            quick_failures=self.budget.quick_failures,
            crash=self.budget.crash,
            crashes=self.budget.crashes,
            lost=self.incidents.has_lost,
            settled=self.incidents.is_settled,
        )
        self.queue.add(Persist(record))
