"""The coordinator's state, and how the rules write to it.

`State` is changed only by the modules of this package, within one call of
`Rendezvous.handle`. The sets of node ids are kept by `refile`, so that no rule has to look at
every node for every message: a membership change of 10,000 nodes stays linear.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from elastane.coordinator.rules.incident import Incident, RestartBudget
from elastane.protocol.effects import Persist, RendezvousEffect, Send, Tell
from elastane.protocol.events import Received
from elastane.protocol.log_events import EventKind, Note
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

# A person reads no more names than these, and a frame has a bound.
_NAMED_MAX = 8


def named(ids: Collection[str]) -> str:
    """Return `ids` in order, the first of them by name and the others counted."""
    first = ", ".join(heapq.nsmallest(_NAMED_MAX, ids))
    more = len(ids) - _NAMED_MAX
    return f"{first} and {more} more" if more > 0 else first


# A rate is of the latest so many changes of the count: with a heartbeat a second, of half a minute.
_SAMPLES_MAX = 32


@dataclass(slots=True)
class StepPace:
    """The latest step counts of one node, each with the time at which it was first heard."""

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))

    def note(self, now_s: float, steps: int | None) -> None:
        """Take in a step count; None, or a smaller one, begins another count."""
        last = self._samples[-1][1] if self._samples else None
        if steps is None or (last is not None and steps < last):
            self._samples.clear()
        if steps is not None and (not self._samples or steps > self._samples[-1][1]):
            self._samples.append((now_s, steps))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate up to now; None while too little is known."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A node that stands still slows down: what it does not say counts, once that is overdue.
        overdue_s = now_s - last_s > 2 * (last_s - first_s) / (len(self._samples) - 1)
        return (last - first) / ((now_s if overdue_s else last_s) - first_s)


class Phase(StrEnum):
    """Where the job stands; `phases` has the rule of each."""

    RECOVERING = "recovering"  # a new coordinator waits for the agents of the last world
    FORMING = "forming"  # no world is in force; the next one is being gathered
    RUNNING = "running"
    DRAINING = "draining"  # workers checkpoint before a planned change
    REGROUPING = "regrouping"  # workers that recover in place wait for the next world
    STOPPING = "stopping"  # all workers of the world are being stopped
    CLOSING = "closing"  # the job has ended and its agents are being told
    CLOSED = "closed"


@dataclass(slots=True, kw_only=True)
class KnownNode:
    """One agent as the coordinator knows it."""

    session: int | None  # None: broken, and its grace to come back is running
    spec: NodeSpec
    offer: PortOffer
    peer_host: str
    local_host: str
    order: int
    heard_s: float
    ready: bool
    offer_used: bool = False  # the port on offer is that of the last world; another follows
    broken_s: float = 0.0
    broken_reason: str = ""
    broken_clean: bool = True
    fence: Fence | None = None  # of the workers that it has, as far as is known
    stale: bool = False  # they are of another world, whatever their fence
    standby: bool = False  # they have no place in a world yet
    uninformed: bool = False  # they have one, and their agent has not heard of it
    interrupted: str = ""  # why they make no step in it any more
    stopping: bool = False  # it is stopping them: it leaves, or could not stay
    workers: tuple[int, ...] = ()  # local ranks of those that have one
    recoverable: set[int] = field(default_factory=set)  # local ranks that can enter another world
    sharding: Sharding | None = None  # of the state that they hold
    recovers_in_place: bool = (
        False  # brought along: they recover in place, whoever has finished its steps
    )
    holding_state: set[int] = field(
        default_factory=set
    )  # local ranks that have made steps, and hold them
    lost: set[int] = field(default_factory=set)  # local ranks whose processes ended since
    replacing: set[int] = field(default_factory=set)  # of those, whose successors were asked for
    lost_pids: dict[int, int] = field(
        default_factory=dict
    )  # the process of each that was last lost
    state: GroupState = "running"
    failures: tuple[Failure, ...] = ()  # brought along while a new coordinator recovers
    leaving: str = ""
    progress: int | None = None
    pace: StepPace = field(default_factory=StepPace)
    waits_at: tuple[WaitPoint, ...] = ()  # where all its workers in the world wait for others
    is_stalled: bool = False  # they do so for too long
    marked: bool = False
    calls: int | None = None
    drained: bool = False
    draining: bool = False  # brought along: its workers wait for the end of a drain

    @property
    def id(self) -> str:
        """The node id."""
        return self.spec.node_id

    @property
    def survivors(self) -> tuple[int, ...]:
        """The local ranks of the world in force that are in the middle of it, and able."""
        if self.standby:
            return ()
        return tuple(i for i in self.workers if i in self.recoverable and i not in self.lost)

    @property
    def has_all_in_world(self) -> bool:
        """Whether all its workers have a place, in the order of their local ranks."""
        return self.workers == tuple(range(self.spec.local_world_size))

    def lose_workers(self, failures: tuple[Failure, ...]) -> None:
        """The processes of these workers have ended."""
        for failure in failures:
            self.lost_pids[failure.local_rank] = failure.pid
            self.lost.add(failure.local_rank)
            for ranks in (self.replacing, self.recoverable, self.holding_state):
                ranks.discard(failure.local_rank)

    def is_known_loss(self, failure: Failure) -> bool:
        """Whether this end was told before."""
        return failure.pid > 0 and self.lost_pids.get(failure.local_rank) == failure.pid

    def enter_world(self, workers: tuple[int, ...]) -> None:
        """Its workers of these local ranks are in a world from now on."""
        self.workers, self.standby = workers, False
        self.lost -= set(workers)
        self.replacing -= set(workers)

    def forget_workers(self) -> None:
        """It has no workers any more."""
        self.workers, self.standby, self.state = (), False, "running"
        self.stale, self.uninformed, self.stopping, self.interrupted = False, False, False, ""
        self.recovers_in_place, self.sharding = False, None
        self.recoverable, self.holding_state, self.lost, self.replacing = set(), set(), set(), set()
        self.lost_pids = {}


@dataclass(slots=True, kw_only=True)
class Contest:
    """An agent that asks for a name which another has; `said` is what it said since, once each."""

    join: Received
    began_s: float
    messages: dict[type, ToCoordinator] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class UnrecordedWorld:
    """What agents hold of a world of which this coordinator has no record."""

    fence: Fence
    size: int
    identity: tuple[int, str, int]  # its size and the address of its process-group store
    node_ids: dict[int, str]


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
    phase_s: float = 0.0
    versions: Versions | None = None
    world: World | None = None
    highest_fence: Fence | None = None  # the highest fence that any agent was ever heard to hold
    # Whether the world in force may still train somewhere: nobody of it is known to have no
    # workers of it any more.
    intact: bool = False
    all_released: bool = (
        False  # the last node was released and no worker of the world in force is left
    )
    world_began_s: float = 0.0
    previous_holder: str = ""
    holder_due_s: float | None = None  # until when it is waited for, once all others are back
    resized: bool = False  # the range of nodes is not that of the command line any more
    requested_range: tuple[int, int] | None = None  # a range that is not in force yet
    resized_s: float = 0.0
    fenced: frozenset[str] = frozenset()  # incarnations that the owner has given up,
    dead: frozenset[str] = frozenset()  # and of those whose processes it knows to have ended
    outcome: Outcome | None = None
    conclusion: Outcome | None = None  # that an agent asked for; in force once it is `outcome`
    authority: bool = True
    nodes: dict[str, KnownNode] = field(default_factory=dict)
    by_session: dict[int, str] = field(default_factory=dict)
    contests: dict[str, Contest] = field(default_factory=dict)
    # Of nodes that departed: their agents, and the ends of workers that they had told.
    departed_lost_pids: dict[str, tuple[str, dict[int, int]]] = field(default_factory=dict)
    arrivals_seen: int = 0
    # Sets of node ids, kept by `refile`.
    idle: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    with_workers: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    unmarked: set[str] = field(default_factory=set)
    undrained: set[str] = field(default_factory=set)
    unrecoverable: set[str] = field(default_factory=set)  # members with workers that cannot regroup
    with_standbys: set[str] = field(default_factory=set)  # who has able workers without a place
    blocked: set[str] = field(default_factory=set)  # members whose workers all wait for others
    stalled: set[str] = field(default_factory=set)  # members whose workers only wait, for too long
    # Who has a place in the world, as `is_of_world` keeps it.
    member_ids: Collection[str] = ()
    member_ids_of: World | None = None
    in_place: bool = False  # the workers of the world in force recover in place,
    partial_replicas: bool = False  # and are no whole replicas: they make no steps (`parts`)
    nodes_per_replica: int = 1  # of how many nodes a replica is
    was_in_place: bool = False  # and they did until they were told to stop
    # What `stateholders` keeps: by node id, since when workers of which agent may go on unseen; and
    # the order of the nodes that hold what the world in force began with, outside of it.
    possibly_training: dict[str, tuple[float, str]] = field(default_factory=dict)
    displaced: dict[str, int] = field(default_factory=dict)
    resumed_without_s: float = (
        0.0  # when this coordinator went on without members that may come back yet
    )
    displaced_on_record: bool = False  # the durable record names some
    peer_lost_s: float | None = None  # when one of them first lost a peer that nobody has explained
    peer_lost_reason: str = ""
    stall_text: str = ""  # where all workers of the world in force wait, if they do
    stalled_worlds: int = 0  # worlds in a row that were ended since all their members waited
    stalled_at_step: int = 0  # how far the last of them was
    unpaid_incident: Incident | None = None  # what the budget could not pay a replacement for
    # Of the phase in hand.
    incident: Incident | None = None
    last_incident: str = ""
    cause: Cause | None = None
    unrecorded_world: UnrecordedWorld | None = None
    drain_target_sent: bool = False
    drain_began_earlier: bool = False  # by another coordinator, perhaps
    drain_target: int | None = None
    drain_stops_all: bool = False  # nobody goes on behind the target
    follow_up: bool = False
    not_before_s: float = 0.0
    first_arrival_s: float | None = None
    last_arrival_s: float = 0.0
    liveness_due_s: float = 0.0
    ended_before: bool = False  # the job ended under another coordinator: its agents come yet
    finished: bool = False
    effects: list[RendezvousEffect] = field(default_factory=list)
    wake_s: float | None = None

    def wait_until(self, deadline_s: float) -> None:
        """Ask for a tick at `deadline_s`, if none comes sooner."""
        if self.wake_s is None or deadline_s < self.wake_s:
            self.wake_s = deadline_s

    def send(self, node: KnownNode, message: ToAgent) -> None:
        """Send to `node`; where its session is broken, its next Join settles what it missed."""
        if node.session is not None:
            self.effects.append(Send(node.session, message))

    def stop(self, node: KnownNode, fence: Fence, reason: str) -> None:
        """Have the workers of `fence` stopped on `node`."""
        grace_s = self.spec.timing.shutdown_timeout_s
        self.send(node, Stop(fence=fence, grace_s=grace_s, reason=reason))

    def log(
        self, kind: EventKind, reason: str, node_id: str = "", /, **data: str | int | float | bool
    ) -> None:
        """Write an event that carries the fence of the world in force."""
        fence = self.world.fence if self.world else None
        note = Note(kind=kind, reason=reason, node_id=node_id, fence=fence, data=data)
        self.effects.append(Tell(note))

    def persist(self) -> None:
        """Make the record durable before whatever this call sends next."""
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
        """The world in hand is followed by another; a planned change is no incident to remember."""
        if self.incident is not None and not self.incident.planned:
            self.last_incident = why
        self.incident = self.unrecorded_world = None

    def enter(self, phase: Phase, reason: str) -> None:
        """Begin `phase`."""
        self.phase, self.phase_reason, self.phase_s = phase, reason, self.now_s

    def reindex(self, node: KnownNode) -> None:
        """Bring the sets in line with the facts of `node`."""
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
        """Remove `node` from everything but the world, which is history."""
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
        """Settle nothing at or below `fence`, which was in force once."""
        if fence is not None and (self.highest_fence is None or fence > self.highest_fence):
            self.highest_fence = fence

    def note_arrival(self) -> None:
        """Start or extend the time in which arrivals are gathered."""
        if self.first_arrival_s is None:
            self.first_arrival_s = self.now_s
        self.last_arrival_s = self.now_s

    def gathering_ends_s(self, *, incomplete: bool = False) -> float:
        """Return when those who come to a running job have been waited for long enough.

        `incomplete`: others are known to be on their way, however long ago the latest came.
        """
        first_s = self.now_s if self.first_arrival_s is None else self.first_arrival_s
        timing = self.spec.timing
        last_s = first_s + timing.gather_max_s
        return last_s if incomplete else min(self.last_arrival_s + timing.gather_s, last_s)

    def is_of_world(self, node_id: str) -> bool:
        """Whether the world in force has a place for this node, whatever that node holds."""
        if self.world is not self.member_ids_of:
            self.member_ids_of = self.world
            self.member_ids = frozenset(m.node_id for m in self.world.members) if self.world else ()
        return node_id in self.member_ids

    def is_member(self, node: KnownNode) -> bool:
        """Whether `node` has workers of the world in force."""
        here = self.world is not None and node.fence == self.world.fence
        return here and not (node.stale or node.standby)

    def members(self) -> list[KnownNode]:
        """Return the nodes that have workers of the world in force."""
        nodes = [self.nodes[i] for i in sorted(self.with_workers)]
        return [node for node in nodes if self.is_member(node)]
