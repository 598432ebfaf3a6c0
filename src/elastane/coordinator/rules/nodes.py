"""The agents as the coordinator knows them: `KnownNode` and its parts, and the `Roster` of all.

Only the methods of these classes change them, and only within one call of `Rendezvous.handle`.
After a change of a node, `Roster.reindex` updates the sets of node ids. So no rule looks at every
node for every message, and a membership change of 10,000 nodes stays linear.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from elastane.protocol.culprits import StandstillEvidence
from elastane.protocol.events import Broken, Received
from elastane.protocol.messages import GroupState, Heartbeat, Holding, NodeCopies, ToCoordinator
from elastane.protocol.model import (
    Failure,
    Fence,
    Joining,
    NodeSpec,
    PortOffer,
    Sharding,
    Versions,
    WaitPoint,
)
from elastane.protocol.stragglers import Pace, StragglerRules

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

    @property
    def last_s(self) -> float:
        """When the newest count was first heard; minus infinity without one."""
        return self._samples[-1][0] if self._samples else float("-inf")

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the step rate until now; None while fewer than two counts are known."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A node without new steps slows down: once the next count is overdue, the silence counts.
        overdue_s = now_s - last_s > 2 * (last_s - first_s) / (len(self._samples) - 1)
        return (last - first) / ((now_s if overdue_s else last_s) - first_s)


@dataclass(slots=True)
class StragglerWatch:
    """When the workers of the current world were last compared for stragglers."""

    rules: StragglerRules = field(default_factory=StragglerRules)
    of: Fence | None = None
    compared_s: float = float("-inf")
    logged_s: float = float("-inf")
    logged_steps: int = 0

    def is_due(self, now_s: float, fence: Fence, every_s: float) -> bool:
        """Begin a comparison, of a new world if there is one; False if the last was just now."""
        if fence != self.of:
            self.of, self.rules = fence, StragglerRules()
        if now_s - self.compared_s < every_s:
            return False
        self.compared_s = now_s
        return True

    def is_to_log(self, now_s: float, steps: int, *, is_news: bool) -> bool:
        """Whether step times are to be logged now, which then counts as done.

        They are logged at intervals, and not again before the slowest rank, which has made `steps`,
        makes another step. `is_news`: they are logged at once.
        """
        is_early = now_s - self.logged_s < STEP_TIMES_LOG_S or steps == self.logged_steps
        if is_early and not is_news:
            return False
        self.logged_s, self.logged_steps = now_s, steps
        return True


# Seconds between two lines of step times: at most 10 MB a week, and one cell of the chart each.
STEP_TIMES_LOG_S = 30.0
# Seconds between two progress lines of the event log: 20 MB a week, and fine enough for a chart.
PROGRESS_LOG_S = 10.0


@dataclass(slots=True)
class LoggedProgress:
    """The step count of the job that the event log got last.

    `counts`: the steps that the worker of each rank has measured, if the script reports none.
    """

    logged_s: float = float("-inf")
    steps: int | None = None
    of: Fence | None = None
    counts: dict[int, int] = field(default_factory=dict)
    counted_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether the step count may be logged again."""
        return now_s - self.logged_s >= PROGRESS_LOG_S

    def note(self, now_s: float, steps: int) -> bool:
        """Record the job's step count; return whether it has changed since it was logged."""
        self.logged_s = now_s
        changed, self.steps = steps != self.steps, steps
        return changed

    def count(
        self, now_s: float, fence: Fence, counts: dict[int, int]
    ) -> tuple[int, int, float] | None:
        """Record measured steps; return how many all ranks made since the last call, and before it.

        The third number is the time since then. None at the first call for a world, and while the
        ranks make none.
        """
        self.logged_s = now_s
        before, since_s = (self.counts, self.counted_s) if fence == self.of else ({}, now_s)
        made = min((counts[rank] - before[rank] for rank in counts if rank in before), default=-1)
        if made == 0:
            return None
        self.of, self.counts, self.counted_s = fence, counts, now_s
        return None if made < 0 else (made, min(before.values()), now_s - since_s)


class Place(StrEnum):
    """Which world the workers of a node belong to."""

    IDLE = "idle"  # it has no workers, as far as is known
    REPORTED = "reported"  # a world that is not on record and may turn out to be the last one
    MEMBER = "member"  # the current world
    STANDBY = "standby"  # none yet, or none any more: they can join the current one
    STALE = "stale"  # a world that is not the current one; they were asked to stop


@dataclass(slots=True, kw_only=True)
class NodeConnection:
    """The session with one agent, or what is known of its end."""

    session: int | None  # None: the connection broke, and the reconnect grace is running
    peer_host: str
    local_host: str
    heard_s: float  # when its last message came
    broken_s: float = 0.0  # when and why the session broke, and whether in order
    broken_reason: str = ""
    broken_clean: bool = True

    def hear(self, now_s: float) -> None:
        """Record that a message came."""
        self.heard_s = now_s

    def end(self, event: Broken, now_s: float) -> None:
        """Record that the peer ended the session."""
        self.session, self.broken_s = None, now_s
        self.broken_reason, self.broken_clean = event.reason, event.clean


@dataclass(slots=True, kw_only=True)
class NodeProgress:
    """The progress of one node's workers, as its heartbeats report it."""

    steps: int | None = None
    met: int = 0  # the round of the last world in which all workers met the others
    pace: StepPace = field(default_factory=StepPace)
    waits_at: tuple[WaitPoint, ...] = ()  # where each worker waits, once all of them do
    is_stalled: bool = False  # all of them have waited too long
    unanswered: tuple[str, ...] = ()  # addresses that do not answer the workers
    refused: str = ""  # the address to which a worker could not connect
    refusal_answered: bool = False  # the connection was refused, not left without an answer
    evidence: tuple[StandstillEvidence, ...] = ()  # what each worker shows, once all stand still
    still_s: float = 0.0  # how long they had stood still at that report
    is_early: bool = False  # that evidence serves to find a mismatch alone
    paces: tuple[Pace, ...] = ()  # the step times of each worker
    measured: StepPace = field(default_factory=StepPace)  # the step rate by `paces`
    copies: NodeCopies | None = None  # the newest copies of the workers' state
    copies_s: float = 0.0  # when they were reported

    def record_steps(self, now_s: float, steps: int | None) -> None:
        """Record how many steps were made."""
        self.steps = steps
        self.pace.note(now_s, steps)

    def record_last_steps(self, now_s: float, steps: int | None) -> None:
        """Record how many steps the workers had shown when they ended; None: they showed none."""
        if steps is not None:
            self.record_steps(now_s, steps)

    def record_waiting(self, message: Heartbeat, *, is_of_now: bool) -> bool:
        """Record where the workers wait; return whether that is new."""
        waits_at = message.waiting if is_of_now else ()
        all_wait = message.all_wait and is_of_now
        unanswered = message.unanswered if is_of_now else ()
        self.met = message.met
        known = (self.waits_at, self.is_stalled, self.unanswered)
        self.waits_at, self.is_stalled, self.unanswered = waits_at, all_wait, unanswered
        return known != (waits_at, all_wait, unanswered)

    def record_refusal(self, address: str, *, was_answered: bool) -> None:
        """Record the address to which a worker could not connect in the current world.

        `was_answered`: by a refusal, which need not come from the other host.
        """
        self.refused, self.refusal_answered = address, was_answered

    def is_refused_by(self, address: str) -> bool:
        """Whether all that is known of an address is that it refused a connection."""
        return self.refusal_answered and address == self.refused and address not in self.unanswered

    @property
    def unreached(self) -> tuple[str, ...]:
        """The addresses that the workers do not reach."""
        return tuple(sorted({*self.unanswered, self.refused} - {""}))

    def record_evidence(
        self, evidence: tuple[StandstillEvidence, ...], still_s: float, *, early: bool
    ) -> None:
        """Record the evidence of a standstill; empty once the workers move again."""
        self.evidence, self.still_s, self.is_early = evidence, still_s, early

    def record_paces(self, now_s: float, message: Heartbeat, *, is_of_now: bool) -> None:
        """Record the step times of the workers in the current world."""
        self.paces = message.paces if is_of_now else ()
        self.measured.note(now_s, min((pace.step for pace in self.paces), default=None))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate of the reported steps, or of the measured ones if none are reported."""
        return (self.measured if self.steps is None else self.pace).steps_per_s(now_s)

    def record_copies(self, now_s: float, copies: NodeCopies | None) -> None:
        """Record the newest copies of the workers' state."""
        self.copies, self.copies_s = copies, now_s

    def restart(self, now_s: float) -> None:
        """Record that the workers entered another world."""
        self.record_steps(now_s, None)
        self.waits_at, self.is_stalled = (), False
        self.unanswered, self.refused, self.refusal_answered = (), "", False
        self.record_evidence((), 0.0, early=False)
        self.paces = ()
        self.measured.note(now_s, None)


@dataclass(slots=True, kw_only=True)
class NodeDrain:
    """How far the workers of one node are in the current drain."""

    gated: bool = False  # they are gated, and their calls were counted
    calls: int | None = None  # the furthest worker's count of should_checkpoint() calls
    saved: bool = False  # they have checkpointed
    # As registered: the last drain of their world, and whether they wait for its end.
    last_number: int = 0
    was_draining: bool = False

    def restart(self) -> None:
        """Begin a drain, or end one."""
        self.gated = self.saved = self.was_draining = False

    def note_earlier(self, last_number: int, *, was_draining: bool) -> None:
        """Record the last drain that an agent had, and whether its workers wait for its end."""
        self.last_number, self.was_draining = last_number, was_draining

    def save(self) -> None:
        """Record that the workers have checkpointed."""
        self.saved = True

    def save_again(self) -> None:
        """Record that the workers have to checkpoint where they wait now."""
        self.saved = False

    def count(self, calls: int | None) -> None:
        """Record that the workers are gated after this many calls."""
        self.gated, self.calls = True, calls

    def excuse(self) -> None:
        """Record that the drain no longer waits for a checkpoint of this node."""
        self.gated = self.saved = True


@dataclass(slots=True, kw_only=True)
class HeldWorkers:
    """The workers that one node has, by local rank."""

    ranks: tuple[int, ...] = ()  # those with a place in the world, in order of rank
    recoverable: set[int] = field(default_factory=set)  # those that can enter another world
    # As registered: they recover in place, including those that finished their steps.
    recovers_in_place: bool = False
    sharding: Sharding | None = None  # how the state that they hold is sharded
    joining: Joining = Joining.ANYTIME  # when others can join their world
    # Those that made a step or received the state in this world or the one before.
    holding_state: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # those whose processes have ended
    replacing: set[int] = field(default_factory=set)  # lost ones with a requested replacement
    forgone: set[int] = field(default_factory=set)  # lost ones that the budget does not replace
    lost_pids: dict[int, int] = field(default_factory=dict)  # the last lost process of each rank
    left_place: bool = False  # some lost their place in a world that continued without them
    state: GroupState = "running"
    interrupted: str = ""  # why they make no further step in their world; empty: they do
    # Their agent is stopping them. They may be members, or standbys, or of a reported world.
    stopping: bool = False

    def lose(self, failures: tuple[Failure, ...]) -> None:
        """Record that the processes of these workers have ended."""
        for failure in failures:
            self.lost_pids[failure.local_rank] = failure.pid
            self.lost.add(failure.local_rank)
            for ranks in (self.replacing, self.recoverable, self.holding_state, self.forgone):
                ranks.discard(failure.local_rank)

    def lose_charged(self, failures: tuple[Failure, ...], renewed: set[int]) -> None:
        """Record ends that were charged before; replacements may have started since."""
        recoverable, forgone = {*self.recoverable}, {*self.forgone}
        self.lose(failures)
        self.recoverable, self.forgone = recoverable, forgone
        self.replacing |= renewed

    def is_known_loss(self, failure: Failure) -> bool:
        """Whether this end of a process was reported before."""
        return failure.pid > 0 and self.lost_pids.get(failure.local_rank) == failure.pid

    def enter_world(self, ranks: tuple[int, ...]) -> None:
        """Record that these local ranks have a place in a world from now on."""
        self.ranks, self.left_place = ranks, False
        self.lost -= set(ranks)
        self.replacing -= set(ranks)
        self.forgone -= set(ranks)

    def leave_world(self, ranks: tuple[int, ...]) -> None:
        """Record that these local ranks, if any, lose their place and keep their processes."""
        self.left_place = bool(ranks)

    def hold_state(self) -> bool:
        """Record that all workers in the world hold the state; return whether that is new."""
        here = {*self.ranks} - self.lost
        news = not self.holding_state.issuperset(here)
        self.holding_state |= here
        return news

    def give_up_state(self) -> None:
        """Record that the state of these workers may be outdated: others may step without them."""
        self.holding_state.clear()

    @property
    def lost_ranks(self) -> set[int]:
        """The local ranks with a place whose processes have ended."""
        return self.lost & {*self.ranks}

    @property
    def unreplaced(self) -> set[int]:
        """The local ranks of lost workers whose replacements are to be started."""
        return self.lost - self.replacing - self.forgone

    @property
    def finished(self) -> set[int]:
        """The local ranks whose workers have made all their steps."""
        return set() if self.stopping else {*self.ranks} - self.recoverable - self.lost

    def succeed(self) -> None:
        """Record that all workers exited with 0."""
        self.state = "succeeded"

    def fail(self) -> None:
        """Record that a worker failed."""
        self.state = "failed"

    def forget_failure(self) -> None:
        """Forget that a worker failed: from now on each failed worker is counted."""
        self.state = "running" if self.state == "failed" else self.state

    def interrupt(self, reason: str) -> None:
        """Record why the workers make no further step in their world; empty: they do."""
        self.interrupted = reason

    def recover(self, ranks: set[int]) -> None:
        """Record which workers can enter another world."""
        self.recoverable = ranks

    def shard(self, sharding: Sharding | None) -> None:
        """Record how the state is sharded."""
        self.sharding = sharding

    def admit(self, joining: Joining) -> None:
        """Record when others can join their world."""
        self.joining = joining

    def replace_lost(self) -> None:
        """Record that replacements of all lost workers are requested."""
        self.replacing |= self.unreplaced

    def forgo_lost(self) -> bool:
        """Record that the budget replaces no lost worker; return whether that is new."""
        news = bool(self.unreplaced)
        self.forgone |= self.unreplaced
        return news

    def stop(self, *, keep_recoverable: bool = False) -> None:
        """Record that the agent is stopping the workers."""
        self.stopping = True
        if not keep_recoverable:
            self.recoverable = set()


@dataclass(slots=True, kw_only=True)
class KnownNode:
    """One agent as the coordinator knows it."""

    spec: NodeSpec
    connection: NodeConnection
    order: int  # of arrival
    offer: PortOffer  # where this node would serve the next process-group store
    ready: bool  # its workers can start quickly
    offer_used: bool = False  # the port was used by the last world; a new offer is on its way
    leaving: str = ""  # why the agent asked to leave; empty: it did not
    is_left_out: bool = False  # other members do not reach it; it joins no world for some time
    leaves_by_s: float = math.inf  # when its drain has to be over, as far as a deadline is known
    place: Place = Place.IDLE
    fence: Fence | None = None  # of the workers it has; None exactly if it is idle
    # The fence of the last assignment that the agent has received. An uninformed agent reports
    # under an older one.
    agent_fence: Fence | None = None
    workers: HeldWorkers = field(default_factory=HeldWorkers)
    failures: tuple[Failure, ...] = ()  # kept until a new coordinator knows the current world
    progress: NodeProgress = field(default_factory=NodeProgress)
    drain: NodeDrain = field(default_factory=NodeDrain)

    @property
    def id(self) -> str:
        """The node id."""
        return self.spec.node_id

    @property
    def session(self) -> int | None:
        """The session of its agent; None: the connection broke."""
        return self.connection.session

    @property
    def is_member(self) -> bool:
        """Whether it has workers of the current world."""
        return self.place is Place.MEMBER

    @property
    def is_current(self) -> bool:
        """Whether its workers, if it has any, may be in the current world or join it."""
        return self.place is not Place.STALE

    @property
    def is_uninformed(self) -> bool:
        """Whether its agent has not received the assignment to the world of its workers."""
        return self.agent_fence != self.fence

    @property
    def survivors(self) -> tuple[int, ...]:
        """The local ranks that are in the current world and can enter another one."""
        if self.place is Place.STANDBY:
            return ()
        held = self.workers
        return tuple(i for i in held.ranks if i in held.recoverable and i not in held.lost)

    @property
    def holds_state(self) -> bool:
        """Whether a worker holds the state of the current world and can enter another one."""
        return bool(self.workers.holding_state.intersection(self.survivors))

    @property
    def has_lost_all(self) -> bool:
        """Whether all of its workers in the current world have ended; others may run since."""
        return self.is_member and self.workers.lost.issuperset(self.workers.ranks)

    @property
    def has_all_in_world(self) -> bool:
        """Whether all local ranks have a place in the world, in their order."""
        return self.workers.ranks == tuple(range(self.spec.local_world_size))

    def is_of(self, fence: Fence) -> bool:
        """Whether `fence` names the workers that the node has now, as its agent may know them."""
        older = self.fence is not None and fence < self.fence
        return fence == self.fence or (self.is_uninformed and older)

    def become_ready(self) -> None:
        """Record that its workers can start quickly."""
        self.ready = True

    def leave(self, reason: str, by_s: float) -> None:
        """Record that the agent asks to leave, and when its drain has to be over; inf: unknown."""
        self.leaving, self.leaves_by_s = reason, by_s

    def leave_out(self) -> None:
        """Record that it joins no world, since other members do not reach it."""
        self.is_left_out = True

    def let_in(self) -> None:
        """Record that it may join a world again."""
        self.is_left_out = False

    def keep_failures(self, failures: tuple[Failure, ...]) -> None:
        """Keep failures until this world is known to be the current one."""
        self.failures = failures
        if failures:
            self.workers.fail()

    def pop_failures(self) -> tuple[Failure, ...]:
        """Return the kept failures, which are counted now."""
        failures, self.failures = self.failures, ()
        self.workers.forget_failure()
        return failures

    def reconnect(self, connection: NodeConnection, offer: PortOffer, *, ready: bool) -> None:
        """Record that the same agent has a new session."""
        self.connection, self.offer, self.ready = connection, offer, ready
        self.offer_used = False

    def renew_offer(self, offer: PortOffer, fence: Fence | None = None) -> None:
        """Record where the node would serve the next store; `fence`: of the workers that said so.

        An offer of members of the current world may still be the port that this world uses.
        """
        self.offer_used = fence is not None and self.offer_used and fence != self.fence
        self.offer = offer

    def bring_workers(self, holding: Holding | None) -> None:
        """Record the workers that the agent brings, in place of all that was known of them.

        Without workers the node is idle. Otherwise its place is still to be determined.
        """
        ends, forgone = self.workers.lost_pids, self.workers.forgone
        self.forget_workers()
        self.drain.was_draining = False
        if holding is None:
            return
        self.fence = self.agent_fence = holding.assignment.fence
        self.place = Place.STANDBY if holding.assignment.waiting else Place.REPORTED
        self.workers = HeldWorkers(
            ranks=holding.assignment.workers or tuple(range(self.spec.local_world_size)),
            recoverable={*holding.able},
            recovers_in_place=holding.in_place,
            sharding=holding.sharding,
            joining=holding.joining,
            lost_pids=ends,
            forgone=forgone,
        )

    def miss_assignment(self, fence: Fence, ranks: tuple[int, ...]) -> None:
        """Record a place in the current world of which the agent has not been informed."""
        self.fence, self.place = fence, Place.MEMBER
        self.workers.enter_world(ranks)

    def enter_world(
        self, fence: Fence, ranks: tuple[int, ...], now_s: float, *, in_place: bool
    ) -> None:
        """Record that these workers are members of a world that is committed now."""
        self.fence = self.agent_fence = fence
        self.place, self.offer_used, self.failures = Place.MEMBER, in_place, ()
        self.workers.state, self.workers.interrupted = "running", ""
        self.workers.enter_world(ranks)
        self.progress.restart(now_s)
        self.drain.restart()

    def become_standby(self, fence: Fence | None = None) -> None:
        """Record that the workers have no place; `fence`: they are started under it."""
        self.workers.leave_world(self.survivors)
        self.place = Place.STANDBY
        if fence is not None:
            self.fence = self.agent_fence = fence

    def become_stale(self) -> None:
        """Record that the workers belong to a world that is not the current one."""
        self.place = Place.STALE

    def become_member(self, *, recorded: bool) -> None:
        """Record that the world of the workers is the current one, or may turn out to be it."""
        self.place = Place.MEMBER if recorded else Place.REPORTED

    def forget_workers(self) -> None:
        """Record that the node has no workers any more."""
        self.place, self.fence, self.agent_fence = Place.IDLE, None, None
        self.workers = HeldWorkers()


@dataclass(slots=True, kw_only=True)
class Contest:
    """A second agent that asks for a node id in use, and its latest message of each type."""

    join: Received
    began_s: float
    messages: dict[type, ToCoordinator] = field(default_factory=dict)

    def keep(self, message: ToCoordinator) -> None:
        """Keep a message until the contest is decided."""
        self.messages[type(message)] = message


@dataclass(slots=True)
class Roster:
    """All agents, by node id and session, and sets of node ids with a common fact."""

    nodes: dict[str, KnownNode] = field(default_factory=dict)
    by_session: dict[int, str] = field(default_factory=dict)
    contests: dict[str, Contest] = field(default_factory=dict)
    # Of departed nodes: the incarnation, and the ends of workers that it had reported.
    departed_lost_pids: dict[str, tuple[str, dict[int, int]]] = field(default_factory=dict)
    arrivals_seen: int = 0
    versions: Versions | None = None  # of the first agent; the others must have the same
    liveness_due_s: float = 0.0  # when a node may be declared departed at the earliest
    # Sets of node ids, kept by `reindex`.
    idle: set[str] = field(default_factory=set)  # connected, without workers, not leaving
    unready: set[str] = field(default_factory=set)
    with_workers: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    ungated: set[str] = field(default_factory=set)  # members that did not count their calls
    unsaved: set[str] = field(default_factory=set)  # members that have not checkpointed
    unrecoverable: set[str] = field(default_factory=set)  # members that cannot recover in place
    with_standbys: set[str] = field(default_factory=set)  # nodes with workers ready to join
    blocked: set[str] = field(default_factory=set)  # members whose workers all wait for others
    stalled: set[str] = field(default_factory=set)  # members whose workers have waited too long
    at_standstill: set[str] = field(default_factory=set)  # members at a standstill

    def load(self, versions: Versions | None) -> None:
        """Take the versions of the job's record."""
        self.versions = versions

    def admit(
        self, spec: NodeSpec, offer: PortOffer, connection: NodeConnection, *, ready: bool
    ) -> KnownNode:
        """Add an agent that has no workers yet, as far as is known."""
        self.arrivals_seen += 1
        node = KnownNode(
            spec=spec, connection=connection, order=self.arrivals_seen, offer=offer, ready=ready
        )
        incarnation, ends = self.departed_lost_pids.pop(node.id, ("", {}))
        if incarnation == spec.incarnation:
            node.workers.lost_pids = ends  # Losses that were charged are not charged again.
        self.nodes[node.id] = node
        self.connect(node)
        self.versions = self.versions or spec.versions
        return node

    def connect(self, node: KnownNode) -> None:
        """Record to which node its session belongs."""
        if node.session is not None:
            self.by_session[node.session] = node.id

    def disconnect(self, node: KnownNode) -> None:
        """Forget the session of a node."""
        if node.session is not None:
            self.by_session.pop(node.session, None)

    def end_session(self, event: Broken, now_s: float) -> KnownNode | None:
        """Record that the peer ended a session; return the node whose session it was."""
        for contested, contest in [*self.contests.items()]:
            if contest.join.session == event.session:
                del self.contests[contested]
        node_id = self.by_session.pop(event.session, None)
        if node_id is None:
            return None
        node = self.nodes[node_id]
        node.connection.end(event, now_s)
        self.reindex(node)
        return node

    def look_by(self, due_s: float) -> None:
        """Check for departures at `due_s` at the latest."""
        self.liveness_due_s = min(self.liveness_due_s, due_s)

    def look_at(self, due_s: float) -> None:
        """Check for departures at `due_s`: no node can have departed before."""
        self.liveness_due_s = due_s

    def begin_contest(self, node_id: str, join: Received, now_s: float) -> None:
        """Let a second agent wait for a node id in use."""
        self.contests[node_id] = Contest(join=join, began_s=now_s)

    def end_contest(self, node_id: str) -> None:
        """Forget that a second agent waits for this node id."""
        del self.contests[node_id]

    def contests_of(self, session: int) -> list[Contest]:
        """Return the contests of an agent that has not been admitted."""
        return [each for each in self.contests.values() if each.join.session == session]

    def members(self) -> list[KnownNode]:
        """Return the nodes that have workers of the current world."""
        return [node for node in self.holders_of_workers() if node.is_member]

    def is_stepping(self) -> bool:
        """Whether any worker of the current world makes steps, even if its node is leaving."""
        return any(node.survivors for node in self.members())

    def holders_of_workers(self) -> list[KnownNode]:
        """Return the nodes that have workers of any world, in order of their ids."""
        return [self.nodes[i] for i in sorted(self.with_workers)]

    def reindex(self, node: KnownNode) -> None:
        """Update the sets of node ids for `node`."""
        present, held = node.session is not None, node.workers
        has_workers = node.place is not Place.IDLE
        member = node.is_member
        places = set(node.survivors) if member else set[int]()
        stays = present and not (node.leaving or node.is_left_out)
        facts = (
            (self.idle, stays and not has_workers),
            (self.unready, not node.ready),
            (self.with_workers, has_workers),
            (self.unreachable, not present),
            (self.leaving, bool(node.leaving)),
            (self.succeeded, member and held.state == "succeeded"),
            (self.ungated, member and not node.drain.gated),
            (self.unsaved, member and not node.drain.saved),
            (self.unrecoverable, member and not _can_recover(node)),
            (self.with_standbys, stays and bool(held.recoverable - places)),
            (self.blocked, member and (node.progress.is_stalled or bool(node.progress.waits_at))),
            (self.stalled, member and node.progress.is_stalled),
            (self.at_standstill, member and bool(node.progress.evidence)),
        )
        for members, belongs in facts:
            if belongs:
                members.add(node.id)
            else:
                members.discard(node.id)

    def forget(self, node: KnownNode) -> None:
        """Remove `node` from everything but the world, which is a record of the past."""
        self.nodes.pop(node.id, None)
        if node.workers.lost_pids:
            ends = (node.spec.incarnation, node.workers.lost_pids)
            self.departed_lost_pids[node.id] = ends
        self.disconnect(node)
        for members in (
            self.idle,
            self.unready,
            self.with_workers,
            self.unreachable,
            self.leaving,
            self.succeeded,
            self.ungated,
            self.unsaved,
            self.unrecoverable,
            self.with_standbys,
            self.blocked,
            self.stalled,
            self.at_standstill,
        ):
            members.discard(node.id)


def _can_recover(node: KnownNode) -> bool:
    """Whether the workers of a member recover in place, as far as is known."""
    held = node.workers
    gone = held.lost.union(failure.local_rank for failure in node.failures)
    return (
        held.stopping or held.recovers_in_place or held.recoverable.issuperset({*held.ranks} - gone)
    )
