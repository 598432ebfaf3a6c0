"""The local worker group of one fence, as the agent's core sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastane.protocol.limits import FAILURES_MAX
from elastane.protocol.messages import GroupState, Holding
from elastane.protocol.model import Assignment, Failure, Fence
from elastane.protocol.sharding import Sharding

# All failures of a report must fit a frame, whatever their alphabet; the first say the most.
FULL_TEXTS_MAX = 32
SHORT_TEXT_CHARS = 200
# The end of a worker's words that fits an event's data.
EVENT_TEXT_CHARS = 500


@dataclass(slots=True)
class Group:
    """The local worker group that was started with the fence `born`.

    Workers that recover in place are of other worlds later; `able` are the local ranks that can
    enter another one as they are.
    """

    assignment: Assignment
    born: Fence
    able: tuple[int, ...] = ()
    sharding: Sharding | None = None  # of the state that they hold
    in_place: bool = False  # all that have a place were able at one time, and recover in place
    renewed: set[int] = field(default_factory=set)  # failed, with a successor that was started
    phase: GroupState = "running"
    halted: str = ""  # why its workers wait for another world
    done: set[int] = field(default_factory=set)
    failures: dict[int, tuple[float, Failure]] = field(default_factory=dict)
    draining: bool = False
    aimed: bool = False
    target: int | None = None
    stops: bool = False  # the drain ends with all workers of the job being stopped
    drained: bool = False
    unasked: bool = False  # they are being stopped, and not because the coordinator said so
    stop_by_s: float | None = None
    stop_from_s: float | None = None

    @property
    def fence(self) -> Fence:
        """The fence of its assignment."""
        return self.assignment.fence

    def holding(self, now_s: float) -> Holding:
        """Return what an agent that registers says of it."""
        return Holding(
            assignment=self.assignment,
            state=self.phase,
            failures=self.aged_failures(now_s),
            draining=self.draining,
            able=self.able,
            in_place=self.in_place,
            sharding=self.sharding,
            halted=self.halted,
            renewed=tuple(sorted(self.renewed)),
        )

    def be_able(self, workers: tuple[int, ...], local_world_size: int) -> None:
        """These can enter another world; who has finished its steps is none of them any more."""
        self.able = workers
        places = self.assignment.workers or range(local_world_size)
        self.in_place = self.in_place or {*workers}.issuperset(places)

    def move(self, fence: Fence) -> None:
        """Be of the world of `fence`, of which the workers make no step any more."""
        self.assignment = msgspec.structs.replace(self.assignment, fence=fence)

    def enter(self, assignment: Assignment) -> None:
        """Be in another world from now on; failures of others than its workers are history."""
        self.assignment, self.phase, self.halted = assignment, "running", ""
        self.in_place = True
        self.draining = self.aimed = self.stops = self.drained = False
        self.target = None
        dead = {*assignment.workers} - {*self.able}
        self.failures = {
            i: found
            for i, found in self.failures.items()
            if i in dead or (i not in assignment.workers and i not in self.renewed)
        }
        self.renewed &= {*self.failures}

    def start_anew(self) -> tuple[int, ...]:
        """Return the local ranks that are to have successors now, each failure's once."""
        missing = sorted(set(self.failures) - self.renewed)
        self.renewed.update(missing)
        return tuple(missing)

    def is_done(self, local_world_size: int) -> bool:
        """Whether all workers that have a place exited with 0."""
        places = self.assignment.workers or range(local_world_size)
        return not self.assignment.waiting and self.done.issuperset(places)

    def is_over(self, workers: tuple[int, ...]) -> bool:
        """Whether all have succeeded, and none of `workers` is a successor that came after them."""
        return self.phase == "succeeded" and not {*workers} & {*self.able}

    def has_place(self, local_rank: int) -> bool:
        """Whether the worker is of the world that the group is in."""
        places = self.assignment.workers
        return not self.assignment.waiting and (not places or local_rank in places)

    def was_stopped(self, ended_s: float) -> bool:
        """Whether a worker ended because it was told to, and not of a fault before that."""
        return self.stop_from_s is not None and ended_s >= self.stop_from_s

    def add_failure(self, failure: Failure, ended_s: float) -> None:
        """Keep `failure` with its end on the own clock, so that its age is right when told."""
        if len(self.failures) >= FULL_TEXTS_MAX:
            failure = msgspec.structs.replace(failure, message=failure.message[-SHORT_TEXT_CHARS:])
        self.renewed.discard(failure.local_rank)
        self.able = tuple(i for i in self.able if i != failure.local_rank)
        if len(self.failures) < FAILURES_MAX or failure.local_rank in self.failures:
            self.failures[failure.local_rank] = (ended_s, failure)

    def aged_failures(self, now_s: float) -> tuple[Failure, ...]:
        """Return the failures with their ages as of `now_s`."""
        return tuple(aged(failure, ended_s, now_s) for ended_s, failure in self.failures.values())


def aged(failure: Failure, ended_s: float, now_s: float) -> Failure:
    """Return `failure` with its age as of `now_s`."""
    return msgspec.structs.replace(failure, age_s=max(0.0, now_s - ended_s))


def failure_data(failure: Failure, *, stopped: bool) -> dict[str, str | int | float | bool]:
    """Return what the event log keeps of a worker's end."""
    return {
        "local_rank": failure.local_rank,
        "rank": failure.rank,
        "pid": failure.pid,
        "exit_code": failure.exit_code,
        "age_s": round(failure.age_s, 6),
        "stopped": stopped,
        "message": failure.message[-EVENT_TEXT_CHARS:],
        "output": failure.output,
        "error_file": failure.error_file,
        "log_file": failure.log_file,
    }
