"""The coordinator's state: what it knows of each node and of the job.

Only the modules of this package change a `State`, and only within one call of `Rendezvous.handle`.
`reindex` keeps sets of node ids up to date, so no rule has to look at every node for every message:
a membership change of 10,000 nodes stays linear.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from elastane.coordinator.rules.incident import Incident, RestartBudget
from elastane.protocol.effects import Persist, RendezvousEffect, Send, WriteEvent
from elastane.protocol.events import Received
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import GroupState, Stop, ToAgent, ToCoordinator
from elastane.protocol.model import (
    Cause,
    Failure,
    Fence,
    JobRecord,
    JobSpec,
    NodeSpec,
    Outcome,
    PortOffer,
    Versions,
    WaitPoint,
    World,
)
from elastane.protocol.sharding import Sharding

# A person reads no more names than these, and a frame is bounded. The text goes to every node, so
# its length must not grow with the job.
_NAMED_MAX = 8


def named(ids: Collection[str]) -> str:
    """Return `ids` in order: the first ones by name, the others as a count."""
    first = ", ".join(heapq.nsmallest(_NAMED_MAX, ids))
    more = len(ids) - _NAMED_MAX
    return f"{first} and {more} more" if more > 0 else first


# The step rate is taken over this many changes of the count: half a minute at one heartbeat a
# second.
_SAMPLES_MAX = 32


@dataclass(slots=True)
class StepPace:
    """The latest step counts of one node, each with the time at which it was first heard."""

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))

    def note(self, now_s: float, steps: int | None) -> None:
        """Record a step count; None, or a smaller one, restarts the record."""
        last = self._samples[-1][1] if self._samples else None
        if steps is None or (last is not None and steps < last):
            self._samples.clear()
        if steps is not None and (not self._samples or steps > self._samples[-1][1]):
            self._samples.append((now_s, steps))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the step rate until now; None while fewer than two counts are known."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A node without new steps slows down: once the next count is overdue, the silence counts.
        overdue_s = now_s - last_s > 2 * (last_s - first_s) / (len(self._samples) - 1)
        return (last - first) / ((now_s if overdue_s else last_s) - first_s)


class Phase(StrEnum):
    """Where the job stands; `machine` has the rule of each phase."""

    RECOVERING = "recovering"  # a new coordinator waits for the agents of the last world
    FORMING = "forming"  # there is no current world; nodes for the next one are gathered
    RUNNING = "running"
    DRAINING = "draining"  # workers stop at one step and checkpoint before a planned change
    REGROUPING = "regrouping"  # interrupted workers keep their state and wait for the next world
    STOPPING = "stopping"  # all workers of the world are being stopped
    CLOSING = "closing"  # the job has ended; agents are being informed
    CLOSED = "closed"


@dataclass(slots=True, kw_only=True)
class KnownNode:
    """One agent as the coordinator knows it."""

    session: int | None  # None: the connection broke, and the reconnect grace is running
    spec: NodeSpec
    offer: PortOffer  # where this node would serve the next process-group store
    peer_host: str
    local_host: str
    order: int  # of arrival
    heard_s: float  # when its last message came
    ready: bool  # its workers can start quickly
    offer_used: bool = False  # the port was used by the last world; a new offer is on its way
    broken_s: float = 0.0  # when and why its session broke, and whether in order
    broken_reason: str = ""
    broken_clean: bool = True
    # Its workers.
    fence: Fence | None = None  # of the workers it has; None: it has none, as far as is known
    stale: bool = False  # they belong to another world than the current one
    standby: bool = False  # they have no place in a world yet
    uninformed: bool = False  # they have a place, and the agent has not received the assignment
    interrupted: str = ""  # why they make no further step in their world; empty: they do
    stopping: bool = False  # the agent is stopping them
    workers: tuple[int, ...] = ()  # local ranks with a place in the world, in order of rank
    recoverable: set[int] = field(default_factory=set)  # local ranks that can enter another world
    sharding: Sharding | None = None  # how the state that they hold is sharded
    # Said at registration: the workers recover in place, also those that finished their steps.
    recovers_in_place: bool = False
    # Local ranks that made a step or received the state in this world or the one before.
    holding_state: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # local ranks whose processes have ended
    replacing: set[int] = field(default_factory=set)  # lost ones with a requested replacement
    lost_pids: dict[int, int] = field(default_factory=dict)  # local rank to its last lost process
    state: GroupState = "running"
    failures: tuple[Failure, ...] = ()  # kept until a new coordinator knows the current world
    leaving: str = ""  # why the agent asked to leave; empty: it did not
    # Progress.
    progress: int | None = None
    pace: StepPace = field(default_factory=StepPace)
    waits_at: tuple[WaitPoint, ...] = ()  # where each of its workers waits, once all of them do
    is_stalled: bool = False  # all of them have waited too long
    # The current drain.
    marked: bool = False  # its workers are gated and counted
    calls: int | None = None  # the furthest worker's count of should_checkpoint() calls
    drained: bool = False  # its workers have checkpointed
    draining: bool = False  # said at registration: its workers wait for the end of a drain

    @property
    def id(self) -> str:
        """The node id."""
        return self.spec.node_id

    @property
    def survivors(self) -> tuple[int, ...]:
        """The local ranks that are in the current world and can enter another one."""
        if self.standby:
            return ()
        return tuple(i for i in self.workers if i in self.recoverable and i not in self.lost)

    @property
    def has_all_in_world(self) -> bool:
        """Whether all local ranks have a place in the world, in their order."""
        return self.workers == tuple(range(self.spec.local_world_size))

    def lose_workers(self, failures: tuple[Failure, ...]) -> None:
        """Record that the processes of these workers have ended."""
        for failure in failures:
            self.lost_pids[failure.local_rank] = failure.pid
            self.lost.add(failure.local_rank)
            for ranks in (self.replacing, self.recoverable, self.holding_state):
                ranks.discard(failure.local_rank)

    def is_known_loss(self, failure: Failure) -> bool:
        """Whether this end of a process was reported before."""
        return failure.pid > 0 and self.lost_pids.get(failure.local_rank) == failure.pid

    def enter_world(self, workers: tuple[int, ...]) -> None:
        """Record that these local ranks have a place in a world from now on."""
        self.workers, self.standby = workers, False
        self.lost -= set(workers)
        self.replacing -= set(workers)

    def forget_workers(self) -> None:
        """Record that the node has no workers any more."""
        self.workers, self.standby, self.state = (), False, "running"
        self.stale, self.uninformed, self.stopping, self.interrupted = False, False, False, ""
        self.recovers_in_place, self.sharding = False, None
        self.recoverable, self.holding_state, self.lost, self.replacing = set(), set(), set(), set()
        self.lost_pids = {}


@dataclass(slots=True, kw_only=True)
class Contest:
    """A second agent that asks for a node id in use, and its latest message of each type."""

    join: Received
    began_s: float
    messages: dict[type, ToCoordinator] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UnrecordedWorld:
    """A world that agents report and of which this coordinator has no record."""

    fence: Fence
    size: int
    identity: tuple[int, str, int]  # nodes, and address and port of the process-group store
    node_ids: dict[int, str]  # by node rank


@dataclass(slots=True)
class State:
    """All that the coordinator knows."""

    spec: JobSpec
    budget: RestartBudget
    store_backed: bool
    now_s: float
    started_s: float
    phase: Phase = Phase.FORMING
    phase_reason: str = "the job begins"
    phase_s: float = 0.0  # when the phase began
    versions: Versions | None = None
    world: World | None = None  # the current world, or the last one
    highest_fence: Fence | None = None  # the highest that any agent ever reported
    # Whether the current world may still train somewhere: no member is known to be without its
    # workers.
    intact: bool = False
    all_released: bool = False  # the last node was released, and no worker of `world` is left
    world_began_s: float = 0.0
    previous_holder: str = ""  # the node of the last coordinator, known to have ended
    holder_due_s: float | None = None  # how long to wait for it, once all others are back
    # The owner's changes.
    resized: bool = False  # the range of nodes differs from the command line's
    requested_range: tuple[int, int] | None = None  # asked for, and not yet applied
    resized_s: float = 0.0
    fenced: frozenset[str] = frozenset()  # incarnations that the owner has given up
    dead: frozenset[str] = frozenset()  # those of them whose processes have all ended
    outcome: Outcome | None = None
    conclusion: Outcome | None = None  # requested by an agent; final once it is `outcome`
    authority: bool = True  # the store backs the decisions
    nodes: dict[str, KnownNode] = field(default_factory=dict)
    by_session: dict[int, str] = field(default_factory=dict)
    contests: dict[str, Contest] = field(default_factory=dict)
    # Of departed nodes: the incarnation, and the ends of workers that it had reported.
    departed_lost_pids: dict[str, tuple[str, dict[int, int]]] = field(default_factory=dict)
    arrivals_seen: int = 0
    # Sets of node ids, kept by `reindex`.
    idle: set[str] = field(default_factory=set)  # connected, without workers, not leaving
    unready: set[str] = field(default_factory=set)
    with_workers: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    unmarked: set[str] = field(default_factory=set)
    undrained: set[str] = field(default_factory=set)
    unrecoverable: set[str] = field(default_factory=set)  # members that cannot recover in place
    with_standbys: set[str] = field(default_factory=set)  # nodes with workers ready to join
    blocked: set[str] = field(default_factory=set)  # members whose workers all wait for others
    stalled: set[str] = field(default_factory=set)  # members whose workers have waited too long
    # The node ids of one world, kept by `is_of_world`.
    member_ids: Collection[str] = ()
    member_ids_of: World | None = None
    # Recovery in place.
    in_place: bool = False  # the workers of the current world recover in place
    was_in_place: bool = False  # they did until they were asked to stop
    partial_replicas: bool = False  # the current world has a partial replica: it makes no steps
    nodes_per_replica: int = 1
    # Kept by `state_holders`. Nodes out of sight whose workers may still train: since when, and
    # which incarnation. Displaced nodes hold the state that the current world began with, and
    # have no place in it: their order.
    possibly_training: dict[str, tuple[float, str]] = field(default_factory=dict)
    displaced: dict[str, int] = field(default_factory=dict)
    resumed_without_s: float = 0.0  # when this coordinator resumed without members that may return
    displaced_on_record: bool = False  # the durable record names displaced nodes
    peer_lost_s: float | None = None  # when a worker lost a peer without a known reason
    peer_lost_reason: str = ""
    stall_text: str = ""  # where all workers of the current world wait, once they do
    stalled_worlds: int = 0  # stalls in a row, without a step between
    stalled_at_step: int = 0  # the step at the last of them
    unpaid_incident: Incident | None = None  # the incident whose replacements exceed the budget
    # Of the current phase.
    incident: Incident | None = None
    last_incident: str = ""
    cause: Cause | None = None
    unrecorded_world: UnrecordedWorld | None = None
    drain_target_sent: bool = False
    drain_began_earlier: bool = False  # a previous coordinator may have asked the workers to drain
    drain_target: int | None = None
    drain_stops_all: bool = False  # all workers stop at the target
    follow_up: bool = False
    not_before_s: float = 0.0
    first_arrival_s: float | None = None
    last_arrival_s: float = 0.0
    liveness_due_s: float = 0.0
    ended_before: bool = False  # the job ended under another coordinator: its agents may still come
    finished: bool = False
    effects: list[RendezvousEffect] = field(default_factory=list)
    wake_s: float | None = None

    def wait_until(self, deadline_s: float) -> None:
        """Request a tick at `deadline_s`, unless an earlier one is due."""
        if self.wake_s is None or deadline_s < self.wake_s:
            self.wake_s = deadline_s

    def send(self, node: KnownNode, message: ToAgent) -> None:
        """Send to `node`; if its session is broken, the next Join makes up for what it missed."""
        if node.session is not None:
            self.effects.append(Send(node.session, message))

    def stop(self, node: KnownNode, fence: Fence, reason: str) -> None:
        """Ask `node` to stop the workers of `fence`."""
        grace_s = self.spec.timing.shutdown_timeout_s
        self.send(node, Stop(fence=fence, grace_s=grace_s, reason=reason))

    def log(
        self, kind: EventKind, reason: str, node_id: str = "", /, **data: str | int | float | bool
    ) -> None:
        """Write an event that carries the current fence."""
        fence = self.world.fence if self.world else None
        event = LogEvent(kind=kind, reason=reason, node_id=node_id, fence=fence, data=data)
        self.effects.append(WriteEvent(event))

    def persist(self) -> None:
        """Make the record durable before anything that this call sends afterwards."""
        self.effects.append(Persist(self.record()))

    def record(self) -> JobRecord:
        """Return the durable part of this state."""
        return JobRecord(
            spec=self.spec,
            versions=self.versions,
            world=self.world,
            restarts_used=self.budget.used,
            outcome=self.outcome,
            resized=self.resized,
            kept=tuple(self.displaced),
            over=self.all_released,
        )

    def finish_incident(self, why: str) -> None:
        """Close the incident, since another world follows; only an unplanned one is remembered."""
        if self.incident is not None and not self.incident.planned:
            self.last_incident = why
        self.incident = self.unrecorded_world = None

    def enter(self, phase: Phase, reason: str) -> None:
        """Begin `phase`."""
        self.phase, self.phase_reason, self.phase_s = phase, reason, self.now_s

    def reindex(self, node: KnownNode) -> None:
        """Update the sets of node ids for `node`."""
        present = node.session is not None
        has_workers = node.fence is not None
        member = self.is_member(node)
        places = set(node.survivors) if member else set[int]()
        gone = node.lost.union(f.local_rank for f in node.failures)
        facts = (
            (self.idle, present and not has_workers and not node.leaving),
            (self.unready, not node.ready),
            (self.with_workers, has_workers),
            (self.unreachable, not present),
            (self.leaving, bool(node.leaving)),
            (self.succeeded, member and node.state == "succeeded"),
            (self.unmarked, member and not node.marked),
            (self.undrained, member and not node.drained),
            (
                self.unrecoverable,
                member
                and not (
                    node.stopping
                    or node.recovers_in_place
                    or node.recoverable.issuperset({*node.workers} - gone)
                ),
            ),
            (self.with_standbys, present and not node.leaving and bool(node.recoverable - places)),
            (self.blocked, member and (node.is_stalled or bool(node.waits_at))),
            (self.stalled, member and node.is_stalled),
        )
        for members, belongs in facts:
            if belongs:
                members.add(node.id)
            else:
                members.discard(node.id)

    def forget(self, node: KnownNode) -> None:
        """Remove `node` from everything but the world, which is a record of the past."""
        self.nodes.pop(node.id, None)
        if node.lost_pids:
            self.departed_lost_pids[node.id] = (node.spec.incarnation, node.lost_pids)
        if node.session is not None:
            self.by_session.pop(node.session, None)
        for members in (
            self.idle,
            self.unready,
            self.with_workers,
            self.unreachable,
            self.leaving,
            self.succeeded,
            self.unmarked,
            self.undrained,
            self.unrecoverable,
            self.with_standbys,
            self.blocked,
            self.stalled,
        ):
            members.discard(node.id)

    def note_fence(self, fence: Fence | None) -> None:
        """Allow no further world at or below `fence`, which some agent held."""
        if fence is not None and (self.highest_fence is None or fence > self.highest_fence):
            self.highest_fence = fence

    def note_arrival(self) -> None:
        """Start or extend the time in which arrivals are gathered."""
        if self.first_arrival_s is None:
            self.first_arrival_s = self.now_s
        self.last_arrival_s = self.now_s

    def gathering_ends_s(self, *, incomplete: bool = False) -> float:
        """Return when a running job stops gathering arrivals.

        `incomplete`: others are known to be on their way, so only the longest time counts.
        """
        first_s = self.now_s if self.first_arrival_s is None else self.first_arrival_s
        timing = self.spec.timing
        last_s = first_s + timing.gather_max_s
        return last_s if incomplete else min(self.last_arrival_s + timing.gather_s, last_s)

    def is_of_world(self, node_id: str) -> bool:
        """Whether the current world has a place for this node, whatever the node holds."""
        if self.world is not self.member_ids_of:
            self.member_ids_of = self.world
            self.member_ids = frozenset(m.node_id for m in self.world.members) if self.world else ()
        return node_id in self.member_ids

    def is_member(self, node: KnownNode) -> bool:
        """Whether `node` has workers of the current world."""
        here = self.world is not None and node.fence == self.world.fence
        return here and not (node.stale or node.standby)

    def members(self) -> list[KnownNode]:
        """Return the nodes that have workers of the current world."""
        nodes = [self.nodes[i] for i in sorted(self.with_workers)]
        return [node for node in nodes if self.is_member(node)]
