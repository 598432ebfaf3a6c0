"""The processes of simulated workers that recover in place, and the worlds in which they meet.

Facts alone: which exist, what each has committed, what it does. `in_place_workers` makes them act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from elastane.protocol.events import AgentEvent
from elastane.protocol.model import NO_SLICE, Assignment, CheckpointUse, Fence, Joining, PortOffer
from simulation.hang_monitor import SimulatedHangMonitor

# Stages of a worker that takes part in its world; others wait, or have ended.
_ANY_USE = CheckpointUse()

TAKES_PART = frozenset(
    {"meeting", "healing", "computing", "applying", "boundary", "parked", "level"}
)
# ... and the stages that wait for a peer and notice its end.
WAITS_FOR_PEERS = frozenset({"meeting", "healing", "computing"})


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One process; `committed` is the step of its state, None while it has none."""

    group: InPlaceGroup
    local_rank: int
    pid: int
    stage: str = "starting"
    able: bool = False
    able_s: float = 0.0
    committed: int | None = None
    restored: int = 0  # the step of the checkpoint that it loaded as it started; 0: of none
    joined: bool = False  # it came to a running job, and so it loaded no checkpoint
    is_first: bool = False  # it was rank 0 of the world in which all workers started
    begins_apart: bool = False  # it lost its first world, so no other loads a checkpoint with it
    torn: bool = False  # it was receiving a state, and holds half of it
    world: Gathering | None = None
    rank: int = -1
    calls: int = 0
    begun: bool = False  # it has come to a boundary, and so it had the state
    moved_s: float = 0.0
    gave_way: bool = False  # it was displaced as surplus and need not survive
    met: int = 0  # the round of the last world in which it had the state
    sole: bool = False  # no worker on another node had that state
    ready: bool = False  # it was interrupted with a step that it could have applied
    made: int = 0  # how many steps this process has made
    places: int = 0  # how many worlds it was assigned to
    # An unmodified script: what its main thread has to do before the next step, whether it is at
    # it, and the step of a checkpoint that is whole and not yet reported.
    owes_save: bool = False
    owes_evaluation: bool = False
    is_busy: bool = False
    reports: int | None = None
    joins: Joining = Joining.ANYTIME  # when others can join its world, as it last reported
    left: str = ""  # the stage in which it left its last world
    last: tuple[Fence, int] | None = None  # its place in the last world that began with it

    @property
    def held(self) -> int:
        """The step of its state, 0 where it has none."""
        return self.committed or 0

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.stage not in ("dead", "done")

    @property
    def name(self) -> str:
        """Host and local rank."""
        return f"{self.group.host}:{self.local_rank}"


@dataclass(slots=True, eq=False)
class InPlaceGroup:
    """One node's workers, from their start until none is left."""

    host: str
    assignment: Assignment
    size: int
    feed: Callable[[AgentEvent], None]
    new_offer: Callable[[], PortOffer]
    start_fence: Fence
    offer: PortOffer
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    phase: str = "running"  # stopping, gone
    gated: bool = False
    drain: int = 0  # the number of its last drain
    target: int | None = None
    aimed_s: float | None = None
    stops: bool = False  # all its workers stop at the target
    drained: bool = False
    crashed: bool = False  # a worker of it has ended since it entered its world
    lacks: bool = False  # a lost worker was the only holder of its state
    part: int = NO_SLICE  # its slice, if a replica spans several nodes
    level: Fence | None = None  # a world with a partial replica whose members are at one step
    joining: Joining = Joining.ANYTIME  # the least value of its workers; the last one if none
    use: CheckpointUse = _ANY_USE  # what its workers did with checkpoints
    minding: SimulatedHangMonitor = field(default_factory=SimulatedHangMonitor)

    @property
    def fence(self) -> Fence:
        """The fence of the world that it is in."""
        return self.assignment.fence

    @property
    def calls(self) -> int:
        """The boundary that the furthest worker with a place has reached."""
        return max((w.calls for w in self.inside()), default=0)

    @property
    def progress(self) -> int | None:
        """The least count of boundaries of its workers that have a place; None: one has not begun.

        As pages have it: a worker counts the boundary before its next step, from 1.
        """
        placed = self.placed()
        begun = [w.calls + 1 for w in placed if w.begun]
        return min(begun) if begun and len(begun) == len(placed) else None

    @property
    def met(self) -> int:
        """The least round in which its workers that have a place last were a whole world."""
        return min((w.met for w in self.placed() if w.alive), default=0)

    @property
    def passed(self) -> int:
        """The last boundary that any of them has passed; 0 while all are at the first."""
        stands = ("meeting", "healing", "boundary", "parked")
        return max((w.calls + (w.stage not in stands) for w in self.inside()), default=0)

    @property
    def furthest(self) -> int | None:
        """The same of all that have state, those on their way into a world as well."""
        stateful = [w for w in self.workers.values() if w.alive and w.committed is not None]
        return max((w.calls for w in stateful), default=None)

    @property
    def able(self) -> tuple[int, ...]:
        """The local ranks of those that can enter another world."""
        return tuple(sorted(i for i, w in self.workers.items() if w.alive and w.able))

    @property
    def sole(self) -> bool:
        """Whether some of its workers hold what no worker of another node holds."""
        return any(w.sole for w in self.workers.values() if w.alive)

    @property
    def saved(self) -> bool:
        """Nothing is saved at a boundary: all is kept in memory."""
        return self.drained

    def placed(self) -> list[SimulatedWorker]:
        """Return the workers that have a place in the world, on their way into it or there."""
        places = self.assignment.workers or range(self.size)
        found = [self.workers[i] for i in places if i in self.workers]
        return [w for w in found if w.alive and not self.assignment.waiting]

    def inside(self) -> Iterator[SimulatedWorker]:
        """Yield the workers that take part in a world."""
        return (w for w in self.workers.values() if w.stage in TAKES_PART)


@dataclass(slots=True, eq=False)
class Gathering:
    """One world as its workers find it: which have come to its store, and what they do together."""

    fence: Fence
    size: int
    in_place: bool
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    began_s: float | None = None
    base: int = 0
    from_state: bool = False
    busy: bool = False
    mismatched: bool = False  # its members call different collectives, and wait for ever
    is_uneven: bool = False  # it has a partial replica
    finished: bool = False

    @property
    def hosts(self) -> list[str]:
        """Where its workers are."""
        return sorted({w.group.host for w in self.workers.values()})

    def all_are(self, stage: str) -> bool:
        """Whether every member is here and does this."""
        return len(self.workers) == self.size and all(
            w.world is self and w.stage == stage for w in self.workers.values()
        )

    @property
    def is_abandoned(self) -> bool:
        """Whether all that came have ended and it never began: its store was not served."""
        return self.began_s is None and not any(w.alive for w in self.workers.values())


def _newest(worlds: Iterable[Gathering]) -> Gathering | None:
    """Return the world that began last, if possible of those that still have a worker.

    Without a store, a host that was suspended may begin a world that is over, and be stopped.
    """
    begun = [world for world in worlds if world.began_s is not None]
    inhabited = [w for w in begun if any(each.world is w for each in w.workers.values())]
    return max(inhabited or begun, key=lambda world: world.began_s or 0.0, default=None)


def left_out(worlds: Iterable[Gathering], groups: Iterable[InPlaceGroup], *, paid: bool) -> str:
    """Return the workers that wait for a place in the newest world, on its nodes, which have room.

    With `paid`, the budget allows replacements, so dead workers without one count too.
    """
    newest = _newest(worlds)
    hosts = {*newest.hosts} if newest is not None else set[str]()
    out = [
        worker.name
        for group in groups
        if group.phase == "running" and group.host in hosts
        for worker in group.workers.values()
        if worker.stage == "waiting" or (paid and worker.stage == "dead")
    ]
    return ", ".join(out)


def short_of(worlds: Iterable[Gathering], able: Mapping[str, int], most: int) -> str:
    """Return which nodes have workers that could be in the newest world after a restart of all.

    `able`: the number of workers of each node that could take part.
    """
    newest = _newest(worlds)
    if newest is None:
        return ""
    here = Counter(worker.group.host for worker in newest.workers.values())
    lacking = [host for host, count in here.items() if count < able.get(host, 0)]
    if len(here) < min(most, len(able)):
        lacking += [host for host in able if host not in here]
    return ", ".join(lacking)
