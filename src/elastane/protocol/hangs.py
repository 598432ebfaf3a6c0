"""Finds workers that hang: a pure judgement from observations, with limits learned from the job.

A worker that recovers in place changes a mark on its status page with each piece of progress. A
worker whose mark does not change is asked whether it waits for others. A worker that waits is
never blamed. A worker hangs if it does not wait and its mark does not change for far longer than
this kind of work ever took. A worker that cannot answer (it holds the interpreter's lock, it is
stopped) counts as not waiting. A worker in an abort of its process group has a limit of its own.

The workers stall if all of them wait, no mark changes and no byte goes over their connections.
Then no worker is to blame, and the coordinator ends the world. Neither their activities nor the
number of their steps matters.

Limits are learned only from the work between two marks. Waiting is left out, and so is work that
the end of a world interrupted. A hang is left out too, or it would raise the limit for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from elastane.protocol.limits import REASON_CHARS_MAX, Timing
from elastane.protocol.model import WaitPoint
from elastane.protocol.ring import spans

# Workers that recover in place are observed this often ...
HANG_LOOK_S = 0.25
# ... and asked whether they wait for others once they have shown no progress for this long, and
# again after each such time. Without an answer within the second time a worker counts as busy.
HANG_ASK_S = 0.5
HANG_ANSWER_S = 1.0
# A worker that a signal has stopped (state T; not a debugger's t) hangs, whatever it was doing.
HANG_STOPPED_S = 1.0
# No other worker hangs before Timing.hang_floor_s, nor before this multiple of the longest recent
# time of the same work; ...
HANG_FACTOR = 10.0
HANG_WINDOW_S = 1800.0
# ... and every worker hangs after this, or after the floor if that is longer: torch gives up a
# collective over gloo after this time. It is also the limit for a process's first steps, which warm
# up and compile, for all compilation, and for an unmodified script, which reports no steps.
HANG_CEILING_S = 1800.0
HANG_STEPS_FIRST = 3
# User code between two steps (evaluation, checkpoints) may take this long.
HANG_BETWEEN_S = 3600.0
# Members stall if all wait for one another in a collective, and no byte moves between them for this
# long. A network may pause for seconds. Where bytes cannot be counted (NCCL), the limit is learned
# from earlier waits, and is at least this.
HANG_STALL_S = 10.0
# Members that all wait to enter their world, or for its state, for this long cannot reach one
# another.
HANG_ENTER_S = 120.0

assert HANG_LOOK_S < HANG_ASK_S < HANG_ANSWER_S < Timing().hang_floor_s < HANG_CEILING_S
assert HANG_LOOK_S < HANG_STOPPED_S < HANG_STALL_S < HANG_ENTER_S < HANG_CEILING_S < HANG_BETWEEN_S


class Activity(IntEnum):
    """The activity that a worker reports."""

    APART = 0  # before its first step, or after its last
    LOADING = 1  # waits for its data loader
    BODY = 2  # in the body of a step
    COMPILING = 3
    BETWEEN = 4  # the user's own code between two steps: evaluation, checkpoints
    ENTERING = 5  # waits for a world
    BUILDING = 6  # has a place and builds its model; the others wait for its first step
    HEALING = 7  # has entered a world, and compares or receives the state


_WORDS = {
    Activity.APART: "outside of its steps",
    Activity.LOADING: "waiting for its data loader",
    Activity.BODY: "in the body of a step",
    Activity.COMPILING: "compiling",
    Activity.BETWEEN: "between two steps",
    Activity.ENTERING: "entering a world",
    Activity.BUILDING: "building its model, between elastane.init() and job.steps()",
    Activity.HEALING: "comparing or receiving the state",
}
# Activities without a limit: their length is not known, or the worker waits for others.
_ENTERING = (Activity.ENTERING, Activity.HEALING)
_UNJUDGED = (Activity.APART, *_ENTERING)


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of one worker. `steps`: the number that this process has made.

    `stopped`: by a signal. `held`: by a debugger. `aborts`: it is in an abort of its process group.
    """

    mark: int
    activity: Activity
    steps: int
    stopped: bool = False
    held: bool = False
    aborts: bool = False


@dataclass(slots=True)
class _Worker:
    sight: Observation
    since_s: float  # when its mark last changed
    busy_s: float  # since when it is not known to have waited for others
    still_s: float  # since when neither its mark nor its traffic has changed
    asked_s: float | None = None
    answered: bool = True
    waits: bool = False
    at: WaitPoint | None = None
    traffic: int | None = None
    stopped_s: float | None = None
    aborts_s: float | None = None


@dataclass(slots=True)
class Findings:
    """The result of one look: reasons by worker, workers to ask, and whether all only wait.

    `waiting`: where the workers wait, once all have waited for HANG_STALL_S. `stalled`: they have
    waited for so long that the wait does not end by itself.
    """

    hung: dict[int, str] = field(default_factory=dict)
    ask: list[int] = field(default_factory=list)
    waiting: tuple[WaitPoint, ...] = ()
    stalled: bool = False


class _Longest:
    """The longest recent times: of this window and of the one before it."""

    def __init__(self) -> None:
        self._now: dict[Activity | None, float] = {}
        self._before: dict[Activity | None, float] = {}
        self._turned_s = 0.0

    def note(self, kind: Activity | None, took_s: float, now_s: float) -> None:
        if now_s - self._turned_s >= HANG_WINDOW_S:
            self._before, self._now, self._turned_s = self._now, {}, now_s
        self._now[kind] = max(took_s, self._now.get(kind, 0.0))

    def of(self, kind: Activity | None) -> float:
        return max(self._now.get(kind, 0.0), self._before.get(kind, 0.0))


class HangRules:
    """Judges the workers of one node that have a place in a world; `now_s` is monotonic.

    No worker hangs before `floor_s`, except one that a signal has stopped, and one whose abort of
    its process group lasts for `abort_s`. Workers are named by unique numbers, such as process ids.
    Learned limits stay when workers are replaced, since they describe the job.
    """

    def __init__(self, floor_s: float, abort_s: float) -> None:
        self._floor_s = floor_s
        self._abort_s = abort_s
        self._workers: dict[int, _Worker] = {}
        # The longest times by activity; None is the time of waiting for others.
        self._longest = _Longest()
        self._now_s = 0.0
        self._looked_s: float | None = None

    def look(self, sights: Mapping[int, Observation], now_s: float) -> Findings:
        """Record an observation of each worker; call it about every HANG_LOOK_S.

        Time without a look (a host that stood still) counts against no worker.
        """
        passed_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        self._looked_s = now_s
        self._now_s += min(passed_s, 4 * HANG_LOOK_S)
        known, self._workers = self._workers, {}
        found = Findings()
        for number, sight in sights.items():
            worker = self._workers[number] = self._seen(known.get(number), sight)
            reason = self._judge(worker)
            if reason:
                found.hung[number] = reason
            elif self._is_to_be_asked(worker):
                worker.asked_s, worker.answered = self._now_s, False
                found.ask.append(number)
        workers = self._workers.values()
        if workers and all(self._is_still(worker) for worker in workers):
            found.waiting = tuple(worker.at for worker in workers if worker.at is not None)
            found.stalled = all(self._is_stalled(worker) for worker in workers)
        return found

    def answered(
        self,
        number: int,
        *,
        waits: bool,
        held: bool = False,
        at: WaitPoint | None = None,
        traffic: int | None = None,
    ) -> None:
        """Record a worker's answer: whether it waits for others, or is held by a debugger.

        `at`: where it is. `traffic`: the bytes over its connections to others so far; None if it
        cannot count them.
        """
        worker = self._workers.get(number)
        if worker is None:
            return
        worker.answered, worker.waits, worker.at = True, waits and not held, at
        if waits or held:
            worker.busy_s = self._now_s
        if None not in (worker.traffic, traffic) and worker.traffic != traffic:
            worker.still_s = self._now_s
        worker.traffic = traffic

    def world_ended(self) -> None:
        """Record that the world ended: interrupted work is not learned, and all times restart."""
        for worker in self._workers.values():
            worker.since_s = worker.busy_s = worker.still_s = self._now_s
            worker.asked_s, worker.answered, worker.waits = None, True, False

    def _limit_s(self, sight: Observation) -> float:
        """Return for how long such a worker may show no progress; at least the floor."""
        if sight.activity is Activity.BETWEEN:
            limit_s = max(HANG_BETWEEN_S, HANG_FACTOR * self._longest.of(sight.activity))
        elif sight.steps < HANG_STEPS_FIRST or sight.activity is Activity.COMPILING:
            limit_s = HANG_CEILING_S
        else:
            limit_s = self._learned_s(sight.activity, self._floor_s)
        return max(limit_s, self._floor_s)

    def _learned_s(self, kind: Activity | None, floor_s: float) -> float:
        longest_s = self._longest.of(kind)
        limit_s = min(HANG_CEILING_S, max(floor_s, HANG_FACTOR * longest_s))
        # The ceiling is no limit for work that is slower than that.
        return max(limit_s, 2 * longest_s)

    def _seen(self, before: _Worker | None, sight: Observation) -> _Worker:
        now_s = self._now_s
        if before is None:
            return _Worker(sight, now_s, now_s, now_s)
        if before.sight.mark != sight.mark:
            self._learn(before)
            worker = _Worker(sight, now_s, now_s, now_s)
        else:
            worker, worker.sight = before, sight
        worker.stopped_s = (before.stopped_s or now_s) if sight.stopped else None
        aborts = sight.aborts and not sight.held
        worker.aborts_s = (before.aborts_s or now_s) if aborts else None
        if sight.held:
            worker.busy_s = now_s
        return worker

    def _learn(self, worker: _Worker) -> None:
        """Learn how long a worker was busy, and how long it waited, before its mark changed."""
        if worker.sight.steps < HANG_STEPS_FIRST:
            return
        idle_s = self._now_s if self._waits(worker) else worker.busy_s
        self._longest.note(None, idle_s - worker.since_s, self._now_s)
        self._longest.note(worker.sight.activity, self._now_s - idle_s, self._now_s)

    def _judge(self, worker: _Worker) -> str:
        """Return why the worker hangs; empty if it does not, or if that is not known yet."""
        now_s, sight = self._now_s, worker.sight
        if worker.stopped_s is not None and now_s - worker.stopped_s >= HANG_STOPPED_S:
            return f"stopped by a signal for {now_s - worker.stopped_s:.1f} s"
        if worker.aborts_s is not None and now_s - worker.aborts_s >= self._abort_s:
            return f"in an abort of its process group for {now_s - worker.aborts_s:.1f} s"
        idle_s, limit_s = now_s - worker.busy_s, self._limit_s(sight)
        if sight.activity in _UNJUDGED or idle_s < limit_s or not self._is_sure(worker):
            return ""
        return (
            f"no progress for {idle_s:.1f} s, {_WORDS[sight.activity]}, after {sight.steps} steps"
            f" (limit {limit_s:.1f} s; if the work is sound, --rdzv-conf hang_floor=SECONDS allows"
            " more)"
        )

    def _is_sure(self, worker: _Worker) -> bool:
        """Whether the worker certainly does not wait: it said so, or did not answer in time."""
        said = worker.asked_s is not None and worker.answered
        return not worker.waits if said else self._is_silent(worker)

    def _waits(self, worker: _Worker) -> bool:
        """Whether the worker waits: its last answer says so, and none is overdue."""
        return worker.waits and not self._is_silent(worker)

    def _is_silent(self, worker: _Worker) -> bool:
        """Whether the worker did not answer in time."""
        if worker.answered or worker.asked_s is None:
            return False
        return self._now_s - worker.asked_s >= HANG_ANSWER_S

    def _is_to_be_asked(self, worker: _Worker) -> bool:
        if not worker.answered:
            return False
        last_s = worker.since_s if worker.asked_s is None else worker.asked_s
        return self._now_s - last_s >= HANG_ASK_S

    def _is_still(self, worker: _Worker) -> bool:
        """Whether the worker has waited for others for a while without any progress or traffic."""
        waits = worker.sight.activity in _ENTERING or self._waits(worker)
        return waits and self._now_s - worker.still_s >= HANG_STALL_S

    def _is_stalled(self, worker: _Worker) -> bool:
        """Whether the worker has waited for so long that its wait does not end by itself."""
        if worker.sight.activity in _ENTERING:
            return self._now_s - worker.still_s >= HANG_ENTER_S
        if worker.traffic is not None:
            return self._is_still(worker)
        # A device may compute what a collective waits for, or a thread may not see that its
        # reduce-scatter ended. Only earlier waits say how long that takes.
        first = worker.sight.steps < HANG_STEPS_FIRST
        limit_s = HANG_CEILING_S if first else self._learned_s(None, HANG_STALL_S)
        return self._now_s - worker.since_s >= limit_s


def waiting_text(waiting: Iterable[WaitPoint]) -> str:
    """Say where workers wait, with the ranks at one place together."""
    places: dict[str, list[int]] = {}
    for each in sorted(waiting, key=lambda each: each.rank):
        places.setdefault(each.where, []).append(each.rank)
    text = ", ".join(f"{ranks_text(ranks)} in {where}" for where, ranks in places.items())
    return text[:REASON_CHARS_MAX] or "at places that no worker named"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, as "ranks 0-2, 7"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks).replace(',', ', ')}"
