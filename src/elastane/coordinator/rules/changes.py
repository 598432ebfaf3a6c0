"""Planned changes of a world: the drain, the gathering of arrivals, and the owner's orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastane.protocol.limits import LEFT_OUT_FIRST_S, LEFT_OUT_MAX_S, Timing
from elastane.protocol.model import World

# No exponent is larger, so that no float overflows.
_DOUBLINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class PlannedGrowth:
    """A restart of all workers at a checkpoint, so that waiting workers join."""

    checkpoint: str
    workers: int  # how many more workers there will be
    nodes: str  # of which nodes, in words
    since_s: float


@dataclass(slots=True)
class CurrentDrain:
    """How far the drain of the current world is; `drain` has its rules.

    `number` tells this drain from those of the same world that were called off. It continues from
    that of the last coordinator.
    """

    number: int = 0
    target_sent: bool = False
    target: int | None = None  # the call at which all workers checkpoint; None: where they are
    stops_all: bool = False  # all workers stop at the target
    began_earlier: bool = False  # a previous coordinator may have asked the workers to drain
    growth: PlannedGrowth | None = None  # all workers restart at its end, to grow the world
    admits: bool = False  # workers that cannot join at another time join at its end

    @property
    def is_optional(self) -> bool:
        """Whether it is called off if it times out, since nothing has to leave the world."""
        return self.admits or self.growth is not None

    def begin(self, growth: PlannedGrowth | None, *, admits: bool) -> None:
        """Begin a drain that has no target yet; with `growth`, all workers restart at its end."""
        self.number += 1
        self.growth, self.admits = growth, admits
        self.target_sent, self.target = False, None
        self.stops_all, self.began_earlier = False, False

    def note_number(self, number: int) -> None:
        """Record the number of a drain that an agent reports of the current world."""
        self.number = max(self.number, number)

    def resume(self, number: int, *, admits: bool) -> None:
        """Continue a drain of the previous coordinator, under its number."""
        self.begin(None, admits=admits)
        self.number, self.began_earlier = number, True

    def aim(self, furthest: int, *, stops_all: bool) -> None:
        """Set the target one call after the furthest; without any call there is none."""
        self.target_sent, self.stops_all = True, stops_all
        self.target = furthest + 1 if furthest else None

    def stop_all(self) -> None:
        """Have all workers stop where they wait."""
        self.stops_all = True


@dataclass(slots=True)
class ArrivalGathering:
    """The time in which nodes for the next world are gathered; `forming` has its rules."""

    follow_up: bool = False  # the next world consists of the nodes of the last one
    not_before_s: float = 0.0
    first_arrival_s: float | None = None
    last_arrival_s: float = 0.0

    def begin(self, not_before_s: float, *, follow_up: bool) -> None:
        """Begin to gather a world that is committed no earlier than `not_before_s`."""
        self.follow_up, self.not_before_s = follow_up, not_before_s

    def postpone(self, until_s: float) -> None:
        """Commit no world before `until_s`."""
        self.not_before_s = max(self.not_before_s, until_s)

    def open_to_all(self) -> None:
        """Wait for other nodes than those of the last world."""
        self.follow_up = False

    def note_arrival(self, now_s: float) -> None:
        """Start or extend the time in which arrivals are gathered."""
        self.first_arrival_s = self.begins_s(now_s)
        self.last_arrival_s = now_s

    def forget_arrivals(self) -> None:
        """End the gathering of arrivals."""
        self.first_arrival_s = None

    def begins_s(self, now_s: float) -> float:
        """Return when the first arrival came; now, if there is none."""
        return now_s if self.first_arrival_s is None else self.first_arrival_s

    def ends_s(self, now_s: float, timing: Timing, *, incomplete: bool = False) -> float:
        """Return when a running job stops gathering arrivals.

        `incomplete`: others are known to be on their way, so only the longest time counts.
        """
        last_s = self.begins_s(now_s) + timing.gather_max_s
        return last_s if incomplete else min(self.last_arrival_s + timing.gather_s, last_s)

    def last_call_ends_s(self, now_s: float, timing: Timing) -> float:
        """Return when a job without a world stops gathering arrivals."""
        last_s = self.begins_s(now_s) + timing.last_call_max_s
        return min(self.last_arrival_s + timing.last_call_s, last_s)


@dataclass(slots=True)
class WaitingCapacity:
    """What waits to join a shrink-only world, and its checkpoints; `growth` has the rules.

    `failed`: how many growths in a row met a fault soon after the workers' start. `called_off`: how
    many drains since that start some worker did not reach in time.
    """

    started_s: float  # when all workers last started, as far as this coordinator knows
    waits_since_s: float | None = None  # None: nothing waits
    quiet_since_s: float | None = None  # the time of the last checkpoint; None: no lack to explain
    failed: int = 0
    called_off: int = 0
    _grows: bool = False  # the next start of all workers is a growth
    _has_grown: bool = False  # the last one was, and no fault has followed
    _told: tuple[int, str] = (0, "")
    _is_explained: bool = False
    _checkpoint: str | None = None  # written since the rules last looked
    does_not_resume: bool = False  # the script wrote one, started again, and read none
    _resumes: bool = False  # a worker that wrote a checkpoint had read one
    _writes: bool = False  # the script has written one, ...
    _wrote_before: bool = False  # ... and before the last start of all workers

    def start_all(self, now_s: float) -> None:
        """Record that all workers start now."""
        self.started_s, self._checkpoint, self.called_off = now_s, None, 0
        self._wrote_before = self._writes
        self._has_grown, self._grows = self._grows, False
        self.forget_waiting()

    def note_growth(self) -> None:
        """Record that all workers restart for a growth; an earlier one without a fault has held."""
        if self._has_grown:
            self.failed = 0
        self._grows = True

    def note_fault(self, now_s: float, lasts_s: float) -> None:
        """Record a fault; the first after a growth shows whether that held for `lasts_s`."""
        if self._has_grown:
            self.failed = self.failed + 1 if now_s < self.started_s + lasts_s else 0
        self._has_grown = self._grows = False

    def note_called_off(self) -> None:
        """Record that some workers did not reach the boundary of a growth in time."""
        self.called_off += 1

    def note_checkpoint(self, where: str, now_s: float, *, resumed: bool) -> bool:
        """Record a checkpoint that is whole on storage.

        Return whether it is the first one to show that the script does not resume.
        """
        self._resumes |= resumed
        before, self._writes = self.does_not_resume, True
        self.does_not_resume = self._wrote_before and not self._resumes
        self._checkpoint = where
        if self.quiet_since_s is not None:
            self.quiet_since_s = now_s
        return self.does_not_resume and not before

    def pop_checkpoint(self) -> str | None:
        """Return the checkpoint that was written since the last call, or None."""
        where, self._checkpoint = self._checkpoint, None
        return where

    def note_waiting(self, workers: int, nodes: str, now_s: float) -> bool:
        """Record how many workers wait, and on which nodes; return whether that is new."""
        if self.waits_since_s is None:
            self.waits_since_s = now_s
            self.quiet_since_s = None if self._is_explained else now_s
        before, self._told = self._told, (workers, nodes)
        return self._told != before

    def note_explained(self) -> None:
        """Record that the lack of checkpoints was explained, which is done once."""
        self._is_explained, self.quiet_since_s = True, None

    def forget_waiting(self) -> None:
        """Record that nothing waits."""
        self.waits_since_s = self.quiet_since_s = None
        self._told = (0, "")


@dataclass(slots=True)
class JoiningTries:
    """The outcome of drains that let workers join; `drain` has the rules."""

    called_off: int = 0  # in a row, since not all workers reached a boundary in time
    not_before_s: float = 0.0  # when the next one may begin

    def note_called_off(self) -> None:
        """Record a drain that was called off."""
        self.called_off += 1

    def pause(self, until_s: float) -> None:
        """Begin no other drain before `until_s`."""
        self.not_before_s = until_s

    def end_pauses(self) -> None:
        """Record that all workers reached a boundary in time, or that all start afresh."""
        self.called_off, self.not_before_s = 0, 0.0


@dataclass(slots=True)
class SilentPair:
    """A node and an address that did not answer it; `other` is the node there.

    `answers`: what the last probe found; None while none has ended.
    """

    asking: str
    other: str
    address: str
    answers: bool | None = None


@dataclass(slots=True, kw_only=True)
class LeftOutNode:
    """A node that joins no world until `until_s`, since other members do not reach it.

    From `trusted_from_s` on it may join once all its `pairs` answer, and until `latest_s` it may
    not while one does not. `number` tells this time from all others.
    """

    number: int
    trusted_from_s: float
    until_s: float
    latest_s: float
    pairs: tuple[SilentPair, ...]


@dataclass(slots=True)
class LeftOut:
    """Nodes that join no world, since other members do not reach them; `cuts` has the rules."""

    nodes: dict[str, LeftOutNode] = field(default_factory=dict)  # by node id
    times: Counter[str] = field(default_factory=Counter)  # how often each was left out
    _number: int = 0
    # The pairs to be probed of each node that asks, with the number of the node left out.
    _asked: dict[str, list[tuple[int, SilentPair]]] = field(default_factory=dict)

    def add(self, node_id: str, now_s: float, pairs: tuple[SilentPair, ...]) -> LeftOutNode:
        """Record that a node is left out from now on, for twice as long as the last time."""
        doublings = min(self.times[node_id], _DOUBLINGS_MAX)
        pause_s = min(LEFT_OUT_MAX_S, LEFT_OUT_FIRST_S * 2.0**doublings)
        self._number += 1
        self.times[node_id] += 1
        self.nodes[node_id] = left = LeftOutNode(
            number=self._number,
            # An answered probe counts at once only the first time. Later it counts after half of
            # the pause, so that a link which fails again and again rarely stops the others.
            trusted_from_s=now_s + (pause_s / 2 if doublings else 0.0),
            until_s=now_s + pause_s,
            latest_s=now_s + LEFT_OUT_MAX_S,
            pairs=pairs,
        )
        self._index()
        return left

    def readmit(self, node_id: str) -> None:
        """Record that a node may join again."""
        del self.nodes[node_id]
        self._index()

    def asked_of(self, node_id: str) -> Sequence[tuple[int, SilentPair]]:
        """Return the pairs that this node is to probe, each with its number."""
        return self._asked.get(node_id, ())

    def _index(self) -> None:
        self._asked = {}
        for left in self.nodes.values():
            for pair in left.pairs:
                self._asked.setdefault(pair.asking, []).append((left.number, pair))


@dataclass(slots=True)
class OwnerOrders:
    """The orders of the job's owner: the range of nodes, and the agents that it has fenced."""

    resized: bool = False  # the range of nodes differs from the command line's
    requested_range: tuple[int, int] | None = None  # asked for, and not yet applied
    resized_s: float = 0.0
    missed: int = 0  # drains in a row after which surplus nodes were still in the world
    fenced: frozenset[str] = frozenset()  # incarnations that the owner has fenced
    dead: frozenset[str] = frozenset()  # those of them whose processes have all ended

    def request_range(self, fewest: int, most: int) -> None:
        """Record the range of nodes that the owner asks for."""
        self.requested_range = (fewest, most)

    def pop_range(self) -> tuple[int, int] | None:
        """Return the requested range once."""
        wanted, self.requested_range = self.requested_range, None
        return wanted

    def note_resized(self) -> None:
        """Record that the owner's range of nodes counts from now on, not the command line's."""
        self.resized = True

    def note_change(self, now_s: float) -> None:
        """Let surplus nodes leave no sooner than some time after `now_s`."""
        self.resized_s, self.missed = now_s, 0

    def note_missed(self, now_s: float) -> None:
        """Record a drain after which no node has left; surplus nodes leave later."""
        self.resized_s, self.missed = now_s, self.missed + 1

    def end_misses(self) -> None:
        """Record that all workers reached the boundary of a drain in time."""
        self.missed = 0

    def fence(self, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
        """Record all agents that the owner has fenced."""
        self.fenced, self.dead = frozenset((*incarnations, *dead)), frozenset(dead)

    def is_fenced(self, incarnation: str) -> bool:
        """Whether the owner has fenced an agent."""
        return _names(self.fenced, incarnation)

    def is_dead(self, incarnation: str) -> bool:
        """Whether the owner knows that an agent and its workers have ended."""
        return _names(self.dead, incarnation)

    def dead_members(self, world: World | None) -> set[str]:
        """Return the members of a world whose agents are known to be dead."""
        if not self.dead or world is None:
            return set()
        return {m.node_id for m in world.members if self.is_dead(m.incarnation)}


def _names(incarnations: frozenset[str], incarnation: str) -> bool:
    """Whether the set has this incarnation, or the pod of which it is one start."""
    return not incarnations.isdisjoint((incarnation, incarnation.partition(".")[0]))
