"""The state of one local worker group, as the agent's rules see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastane.protocol.limits import FAILURES_MAX
from elastane.protocol.messages import GroupState, Holding
from elastane.protocol.model import Assignment, Failure, Fence
from elastane.protocol.sharding import Sharding

# All failures of a report must fit into one frame, in any alphabet. The first ones say the most.
FULL_TEXTS_MAX = 32
SHORT_TEXT_CHARS = 200
# How much of the end of a worker's error text fits into an event's data.
EVENT_TEXT_CHARS = 500


@dataclass(slots=True)
class Group:
    """The local worker group that was started with the fence `start_fence`.

    Workers that recover in place enter later worlds, so `fence` may be newer. `recoverable` holds
    the local ranks that can enter another world as they are.
    """

    assignment: Assignment
    start_fence: Fence
    recoverable: tuple[int, ...] = ()
    sharding: Sharding | None = None  # of the training state that the workers hold
    in_place: bool = False  # every worker with a place could recover in place at some time
    # local ranks that failed and have a replacement
    replaced: set[int] = field(default_factory=set)
    phase: GroupState = "running"
    interrupted: str = ""  # why its workers were interrupted and wait for another world
    done: set[int] = field(default_factory=set)
    failures: dict[int, tuple[float, Failure]] = field(default_factory=dict)
    draining: bool = False
    aimed: bool = False
    target: int | None = None
    stops: bool = False  # the drain ends by stopping all workers of the job
    drained: bool = False
    unasked: bool = False  # the workers are being stopped without an order of the coordinator
    stop_by_s: float | None = None
    stop_from_s: float | None = None

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
            able=self.recoverable,
            in_place=self.in_place,
            sharding=self.sharding,
            halted=self.interrupted,
            renewed=tuple(sorted(self.replaced)),
        )

    def update_recoverable(self, workers: tuple[int, ...], local_world_size: int) -> None:
        """Set which workers can enter another world; workers that finished their steps cannot."""
        self.recoverable = workers
        places = self.assignment.workers or range(local_world_size)
        self.in_place = self.in_place or {*workers}.issuperset(places)

    def move(self, fence: Fence) -> None:
        """Adopt the epoch of a world these workers will not join, so later reports carry it."""
        self.assignment = msgspec.structs.replace(self.assignment, fence=fence)

    def enter(self, assignment: Assignment) -> None:
        """Enter another world; keep only failures that no replacement has answered."""
        self.assignment, self.phase, self.interrupted = assignment, "running", ""
        self.in_place = True
        self.draining = self.aimed = self.stops = self.drained = False
        self.target = None
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

    def is_done(self, local_world_size: int) -> bool:
        """Whether every worker with a place exited with code 0."""
        places = self.assignment.workers or range(local_world_size)
        return not self.assignment.waiting and self.done.issuperset(places)

    def has_finished(self, workers: tuple[int, ...]) -> bool:
        """Whether all workers succeeded, and no worker of `workers` was started after that."""
        return self.phase == "succeeded" and not {*workers} & {*self.recoverable}

    def has_place(self, local_rank: int) -> bool:
        """Whether the worker belongs to the current world of this group."""
        places = self.assignment.workers
        return not self.assignment.waiting and (not places or local_rank in places)

    def was_stopped(self, ended_s: float) -> bool:
        """Whether a worker that ended at `ended_s` was stopped, not failed before that."""
        return self.stop_from_s is not None and ended_s >= self.stop_from_s

    def add_failure(self, failure: Failure, ended_s: float) -> None:
        """Store `failure` with its time on the own clock, from which its age is computed."""
        if len(self.failures) >= FULL_TEXTS_MAX:
            failure = msgspec.structs.replace(failure, message=failure.message[-SHORT_TEXT_CHARS:])
        self.replaced.discard(failure.local_rank)
        self.recoverable = tuple(i for i in self.recoverable if i != failure.local_rank)
        if len(self.failures) < FAILURES_MAX or failure.local_rank in self.failures:
            self.failures[failure.local_rank] = (ended_s, failure)

    def aged_failures(self, now_s: float) -> tuple[Failure, ...]:
        """Return the failures with their ages as of `now_s`."""
        return tuple(aged(failure, ended_s, now_s) for ended_s, failure in self.failures.values())


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
        "message": failure.message[-EVENT_TEXT_CHARS:],
        "output": failure.output,
        "error_file": failure.error_file,
        "log_file": failure.log_file,
    }
