"""The goodput account of a job: each second of its wall time has one cause, from its event log.

Pure: events in, intervals out. The intervals have no gaps, so they sum to the wall time even if
the log is incomplete. An event is never placed before the one before it, so no interval is negative
after a clock was set back.

The account treats the job as one machine, whose state is the cause of the seconds that pass:

    state         event                              next state
    starting      first world's first step           productive
    starting      waiting (for nodes or workers)     waiting for nodes
    productive    drain-started, growth              draining
    productive    incident                           rebuilding
    productive    stall                              stalled, for the 10 s before it too
    any           culprit                            stalled, since the workers stand still
    stalled       progress, pace                     productive
    any           round-settled of another world     starting (the first) or rebuilding
    any           waiting (for nodes or workers)     waiting for nodes
    any           all agents have stopped            waiting for nodes
    rebuilding    first step of all nodes            productive, or retried

Some causes are known only later, and replace an interval's first cause:

- `incident`: detecting, from the earliest failure of the world until then.
- first step of all nodes (`workers-training`): rebuilding until the process group was built,
  healing until all members held the state, and retried until the step that a fault interrupted was
  committed. New workers are starting instead, since they import, build a model and restore.
- after a restore: retried until a `progress` event has the highest step count again.
- `paused`: saving, evaluating or restoring, of what was productive, starting or rebuilding.
- `events-lost`: unknown, since the last event of the process that lost them.

A script that reports no steps is productive once its workers have started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from elastane.observe.events import LoggedEvent
from elastane.observe.incidents import IncidentView
from elastane.observe.needs import Need, troubles_of
from elastane.observe.view import IncidentTrack, JobView
from elastane.protocol.hangs import HANG_STALL_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import NO_RANK
from elastane.protocol.pauses import Pause

_Fence = tuple[int | None, int | None]
# A hint is shown if it concerns this share of the wall time, and this many seconds.
HELP_SHARE = 0.01
HELP_S = 1.0
# Intervals that are kept one by one: those of some thousand incidents. Of older ones only the sums
# of seconds are kept, so that memory stays bounded.
INTERVALS_MAX = 16_384
# Incidents of one cause that a line names, the longest first.
INCIDENTS_SHOWN = 3


class TimeCause(StrEnum):
    """The cause of a second; the value is the text for people."""

    PRODUCTIVE = "productive"
    RETRIED = "retried"
    DETECTING = "detecting"
    REBUILDING = "rebuilding"
    HEALING = "healing"
    DRAINING = "draining"
    RESTORING = "restoring"
    SAVING = "saving"
    EVALUATING = "evaluating"
    WAITING = "waiting for nodes"
    STARTING = "starting"
    STALLED = "stalled"
    UNKNOWN = "unknown"


class Interval(msgspec.Struct, frozen=True):
    """Seconds of one cause. `incident`: the number of the incident that they belong to, or 0."""

    from_s: float
    to_s: float
    cause: TimeCause
    incident: int = 0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.to_s - self.from_s


class CauseSeconds(msgspec.Struct, frozen=True):
    """The seconds of one cause, in all and for each incident."""

    seconds: float
    incidents: dict[int, float]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one run of a job; times are wall clock seconds.

    `older`: the seconds by cause before the first of the intervals. `helped`: in words, how the
    lost time could have been shorter; empty without a proposal. `missing_s`: the seconds of the run
    before `from_s`, while the coordinator logged on another node.
    """

    from_s: float
    to_s: float
    intervals: tuple[Interval, ...]
    older: dict[TimeCause, float] = {}
    helped: tuple[str, ...] = ()
    missing_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """The wall time of the job, without the seconds that are missing."""
        return self.to_s - self.from_s

    @property
    def goodput(self) -> float:
        """The productive share of the wall time; 0 for a job without a second."""
        productive = self.older.get(TimeCause.PRODUCTIVE, 0.0)
        productive += sum(
            one.seconds for one in self.intervals if one.cause is TimeCause.PRODUCTIVE
        )
        return productive / self.wall_s if self.wall_s > 0 else 0.0

    def causes(self) -> dict[TimeCause, CauseSeconds]:
        """Return the seconds by cause, the longest first."""
        seconds = dict(self.older)
        incidents: dict[TimeCause, dict[int, float]] = {}
        for one in self.intervals:
            seconds[one.cause] = seconds.get(one.cause, 0.0) + one.seconds
            if one.incident:
                of_cause = incidents.setdefault(one.cause, {})
                of_cause[one.incident] = of_cause.get(one.incident, 0.0) + one.seconds
        ordered = sorted(seconds, key=lambda cause: -seconds[cause])
        return {cause: CauseSeconds(seconds[cause], incidents.get(cause, {})) for cause in ordered}


def account_of(events: Iterable[LoggedEvent], now_s: float | None = None) -> Account | None:
    """Return the account of a job's last run, from its events in the merged order.

    `now_s`: until when a job that has not ended is accounted; None: until its last event. None if
    there is no event.
    """
    accounting = LogAccount()
    for event in events:
        accounting.add(event)
    return accounting.account(now_s)


class LogAccount:
    """Makes the account of a log from its events one by one, without keeping them."""

    def __init__(self) -> None:
        self._track = IncidentTrack()
        self._accountant = Accountant()

    def through(self, events: Iterable[LoggedEvent]) -> Iterator[LoggedEvent]:
        """Add each event and yield it, for another reader of the same log."""
        for event in events:
            self.add(event)
            yield event

    def add(self, event: LoggedEvent) -> None:
        """Add an event in the merged order."""
        # Most events of a long job are step counts and measurements, which are handled faster. A
        # step count only changes a stall, and a measurement changes no incident.
        changes_none = event.kind in _CHANGES_NONE or (
            event.kind in _COUNTS and self._track.incidents.beside("stall") is None
        )
        if not changes_none:
            self._track.add(event)
        self._accountant.add(event, self._track)

    def account(self, now_s: float | None = None) -> Account | None:
        """Return the account until now, as `account_of` does."""
        return self._accountant.account(self._track, now_s)

    def troubles(self) -> list[Need]:
        """Return what a person should know of the newest run while it lasts, worst first."""
        return troubles_of(self._track.incidents, self._track.stragglers)


# Shown in place of an account.
NOT_HERE = "the coordinator logs on another node; one --log-dir for all nodes has all"
# Shown beside an account that begins later than the run.
_WAS_NOT_HERE = "the coordinator logged on another node; one --log-dir for all nodes has all"
# Events of the coordinator, of which each run has some.
_DECISIONS = frozenset(
    {
        EventKind.COORDINATOR_STARTED,
        EventKind.NODE_JOINED,
        EventKind.WAITING,
        EventKind.ROUND_SETTLED,
        EventKind.ROUND_RESUMED,
        EventKind.JOB_ENDED,
    }
)
_COUNTS = frozenset({EventKind.PROGRESS, EventKind.PACE})
_CHANGES_NONE = frozenset(
    {
        EventKind.CHECKPOINT_SAVED,
        EventKind.PAUSED,
        EventKind.STEP_TIMES,
        EventKind.WORKERS_INTERRUPTED,
        EventKind.WORKERS_REGROUPED,
    }
)


class Accountant:
    """Keeps the account of a running job, event by event; memory does not grow with the job."""

    def __init__(self) -> None:
        self._run = 0
        self._machine: _Machine | None = None
        self._has_decisions = False  # of this run

    def add(self, event: LoggedEvent, view: JobView | IncidentTrack) -> None:
        """Add an event; `view` is the view after it, with its run and its incident."""
        if self._machine is None or view.run != self._run:
            begun_s = event.time_s if view.started_s is None else view.started_s
            self._machine = _Machine(begun_s)
            self._run, self._has_decisions = view.run, False
        if event.kind in _DECISIONS and not self._has_decisions:
            self._machine.take_over(event.time_s)
            self._has_decisions = True
        self._machine.add(event, view.incidents.belongs_to)

    def account(self, view: JobView | IncidentTrack, now_s: float | None = None) -> Account | None:
        """Return the account of the newest run; None if the log has no event of its coordinator.

        Then the coordinator logs on another node, and steps and incidents are not in this log. If
        it has moved to a node of this log, the account begins there.
        `now_s`: until when a job that has not ended is accounted; None: until its last event.
        """
        if self._machine is None or not self._has_decisions:
            return None
        # A copy is closed, since the next event may change the cause of the last seconds.
        ledger = self._machine.copy().close(now_s)
        account = Account(
            from_s=ledger.from_s,
            to_s=ledger.until_s,
            intervals=tuple(ledger.entries),
            older=ledger.older,
            missing_s=ledger.from_s - self._machine.from_s,
        )
        helped = _helped(account, view.incidents.listed)
        return msgspec.structs.replace(account, helped=helped)


class _Ledger:
    """Intervals without gaps, up to a time that never goes back."""

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.until_s = from_s
        self.entries: list[Interval] = []
        self.older: dict[TimeCause, float] = {}  # seconds before the first entry

    def copy(self) -> _Ledger:
        """Return an independent copy."""
        copied = copy(self)
        copied.entries, copied.older = list(self.entries), dict(self.older)
        return copied

    def enter(self, to_s: float, cause: TimeCause, incident: int) -> None:
        """Append an interval that ends at `to_s`."""
        if to_s <= self.until_s:
            return
        from_s, self.until_s = self.until_s, to_s
        last = self.entries[-1] if self.entries else None
        if last is not None and (last.cause, last.incident) == (cause, incident):
            from_s = self.entries.pop().from_s
        self.entries.append(Interval(from_s, to_s, cause, incident))
        if len(self.entries) > INTERVALS_MAX:
            self._sum_up(INTERVALS_MAX // 2)

    def _sum_up(self, count: int) -> None:
        """Replace the oldest intervals by their sums of seconds."""
        for one in self.entries[:count]:
            self.older[one.cause] = self.older.get(one.cause, 0.0) + one.seconds
        del self.entries[:count]

    def replace(self, from_s: float, to_s: float, cause: TimeCause, incident: int) -> None:
        """Change the cause of a time that has intervals; the time outside of them is ignored."""
        if not self.entries:
            return
        from_s, until_s = max(from_s, self.entries[0].from_s), self.until_s
        if min(to_s, until_s) <= from_s:
            return
        kept: list[Interval] = []
        while self.entries and self.entries[-1].to_s > from_s:
            kept.append(self.entries.pop())
        first = kept[-1]
        self.until_s = first.from_s
        self.enter(from_s, first.cause, first.incident)
        self.enter(min(to_s, until_s), cause, incident)
        for one in reversed(kept):
            self.enter(one.to_s, one.cause, one.incident)

    def divide(
        self, from_s: float, to_s: float, cause: TimeCause, of: frozenset[TimeCause]
    ) -> None:
        """Give this cause to what has one of the causes `of` in a time; it keeps its incident."""
        found: list[Interval] = []
        for one in reversed(self.entries):
            if one.to_s <= from_s:
                break
            if one.cause in of:
                found.append(one)
        for one in found:
            self.replace(max(one.from_s, from_s), min(one.to_s, to_s), cause, one.incident)

    def divide_back(
        self, to_s: float, seconds: float, cause: TimeCause, of: frozenset[TimeCause]
    ) -> None:
        """Give this cause to the last `seconds` before `to_s` that have one of the causes `of`."""
        found: list[Interval] = []
        for one in self.entries[: -_BACK_MAX - 1 : -1]:
            until_s = min(one.to_s, to_s)
            if one.cause in of and until_s > one.from_s and seconds > 0:
                from_s = max(one.from_s, until_s - seconds)
                found.append(Interval(from_s, until_s, cause, one.incident))
                seconds -= until_s - from_s
        for one in found:
            self.replace(one.from_s, one.to_s, cause, one.incident)

    def since(self, causes: frozenset[TimeCause]) -> float:
        """Return since when all seconds have one of these causes."""
        from_s = self.until_s
        for one in reversed(self.entries):
            if one.cause not in causes:
                break
            from_s = one.from_s
        return from_s


@dataclass(slots=True)
class _World:
    """The known facts about the current world."""

    fence: _Fence = (None, None)
    from_s: float = 0.0
    nodes: int = 0
    failed_s: float | None = None  # when its first worker failed
    is_in_place: bool = False  # survivors entered it with their processes
    started_s: float | None = None
    measured_s: float | None = None  # when the first step that was only measured was made
    trained: set[str] = field(default_factory=set)  # nodes with a first step
    built_s: float | None = None
    healed_s: float | None = None
    trained_s: float | None = None
    restored_step: int | None = None  # where its workers continue from a saved state
    counts: tuple[float, int] | None = None  # the time of the last step count, and the count

    @property
    def has_trained(self) -> bool:
        """Whether all its nodes have made their first step."""
        return bool(self.trained) and len(self.trained) >= self.nodes


_WORKING = frozenset({TimeCause.PRODUCTIVE, TimeCause.RETRIED})
# Times in which a worker may have restored, ...
_BEFORE_STEPS = frozenset({TimeCause.STARTING, TimeCause.REBUILDING})
# ... and those in which it may have saved or evaluated before the first step is known.
_UNTIL_STEPS = frozenset({TimeCause.STARTING, TimeCause.PRODUCTIVE})
# Intervals in which short pauses that were reported together are sought.
_BACK_MAX = 64
_PAUSES = {
    Pause.SAVING.word: TimeCause.SAVING,
    Pause.EVALUATING.word: TimeCause.EVALUATING,
    Pause.RESTORING.word: TimeCause.RESTORING,
}
# Pauses of the beginning of a world, before its first step is known.
_PAUSES_MAX = 64


class _Machine:
    """The job as one machine: the cause of the seconds that pass now."""

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self._now_s = from_s
        self._ledger = _Ledger(from_s)
        self._cause = TimeCause.STARTING
        self._incident = 0
        self._stalled_s = from_s  # when a stall was found
        self._fault = False  # whether the world ended by a failure, not by a planned change
        self._world = _World()
        self._had_world = False
        self._has_steps = False
        self._away_s: float | None = None  # when agents first missed their coordinator
        self._assumed: deque[Interval] = deque(maxlen=INTERVALS_MAX)
        self._pauses: deque[tuple[float, float, TimeCause]] = deque(maxlen=_PAUSES_MAX)
        self._highest = 0
        self._agents: set[tuple[str, int]] = set()
        self._nodes: set[str] = set()  # that log here
        # The world that workers here have entered, if this log does not have its beginning.
        self._entered: _World | None = None
        self._logged_s: dict[tuple[str, int], float] = {}
        self._is_over = False

    def add(self, event: LoggedEvent, incident: int) -> None:
        """Add the time until an event, and its effect; events after the job's end are ignored."""
        if self._is_over:
            return
        self._now_s = max(self._now_s, event.time_s)
        rule = _RULES.get(event.kind)
        if rule is not None:
            self._pass()
            rule(self, event, incident)
        self._logged_s[event.host, event.pid] = event.time_s

    def _pass(self) -> None:
        """Add the time until the newest event to the current cause."""
        self._ledger.enter(self._now_s, self._cause, self._incident)

    def copy(self) -> _Machine:
        """Return a machine that can be closed while this one continues."""
        copied = copy(self)
        copied._ledger = self._ledger.copy()
        copied._world = copy(self._world)
        copied._assumed = deque(self._assumed, self._assumed.maxlen)
        copied._pauses = deque(self._pauses, self._pauses.maxlen)
        return copied

    def close(self, now_s: float | None) -> _Ledger:
        """Return the intervals until the end, or until `now_s`."""
        self._pass()
        if now_s is not None and not self._is_over:
            self._ledger.enter(now_s, self._cause, self._incident)
        self._end_world()
        return self._ledger

    def take_over(self, time_s: float) -> None:
        """Begin with the first decision in this log, if workers have entered a world before.

        That world was decided by a coordinator that logs elsewhere.
        """
        world = self._entered
        if world is None:
            return
        self._now_s = max(self._now_s, time_s)
        self._ledger = _Ledger(self._now_s)
        self._stalled_s = world.from_s = self._now_s
        self._world, self._had_world = world, True
        self._cause = TimeCause.PRODUCTIVE if world.has_trained else TimeCause.STARTING

    def job_ended(self, _event: LoggedEvent, _incident: int) -> None:
        self._is_over = True

    def round_settled(self, event: LoggedEvent, incident: int) -> None:
        self._end_world()
        self._away_s = None
        self._world = _World(
            fence=(event.round, event.attempt),
            from_s=self._ledger.until_s,
            nodes=event.number("nodes") or 0,
        )
        self._pauses.clear()
        if self._had_world:
            self._become(TimeCause.REBUILDING, incident or self._incident)
        else:
            self._become(TimeCause.STARTING, 0)
        self._had_world = True

    def worker_exited(self, event: LoggedEvent, _incident: int) -> None:
        """Record when the first worker with a place failed; the coordinator learns it later."""
        code = event.number("exit_code")
        if not code or event.data.get("stopped") or event.number("rank") in (None, NO_RANK):
            return
        if self._is_of_world(event):
            failed_s = event.time_s - event.measure("age_s")
            self._world.failed_s = min(failed_s, self._world.failed_s or failed_s)

    def world_failed(self, event: LoggedEvent, incident: int) -> None:
        self._end_world()
        self._fault = True
        self._note_loss(event)
        if self._world.failed_s is not None:
            failed_s = max(self._world.failed_s, self._ledger.since(_WORKING))
            self._ledger.replace(failed_s, self._ledger.until_s, TimeCause.DETECTING, incident)
        self._become(TimeCause.REBUILDING, incident or self._incident)

    def _note_loss(self, event: LoggedEvent) -> None:
        """Record when a node was lost, from which on its peers waited for it.

        One that was lost with its coordinator was lost when agents missed that.
        """
        lost_s = event.time_s - event.measure("age_s") if event.measure("age_s") else None
        if event.number("departed"):
            lost_s = self._away_s
        if lost_s is not None:
            self._world.failed_s = min(lost_s, self._world.failed_s or lost_s)

    def coordinator_away(self, event: LoggedEvent, _incident: int) -> None:
        if self._away_s is None:
            self._away_s = event.time_s

    def world_resumed(self, _event: LoggedEvent, _incident: int) -> None:
        self._away_s = None

    def drain_started(self, _event: LoggedEvent, incident: int) -> None:
        if self._cause in _WORKING:
            self._fault = False
            self._become(TimeCause.DRAINING, incident)

    def drain_ended(self, _event: LoggedEvent, incident: int) -> None:
        if self._cause is TimeCause.DRAINING:
            self._become(TimeCause.REBUILDING, incident or self._incident)

    def waiting(self, event: LoggedEvent, incident: int) -> None:
        """Change to waiting for nodes, unless the event says that the workers continue."""
        if "min_nodes" in event.data or "min_workers" in event.data:
            self._become(TimeCause.WAITING, incident or self._incident)

    def stalled(self, _event: LoggedEvent, incident: int) -> None:
        from_s = max(self._ledger.until_s - HANG_STALL_S, self._ledger.since(_WORKING))
        self._become_stalled(from_s, incident)

    def standstill(self, event: LoggedEvent, incident: int) -> None:
        """Change to stalled, since the last move of the workers that wait for one of them.

        A script that reports no steps is not known as productive before its world has ended, so
        the time counts from the start of its workers.
        """
        if not event.measure("still_s"):
            return  # It was found after a failure, which ended the world.
        since_s = self._ledger.since(_WORKING)
        begun_s = self._world.measured_s or self._world.started_s
        if not self._has_steps and begun_s is not None:
            since_s = min(since_s, begun_s)
        self._become_stalled(
            max(self._ledger.until_s - event.measure("still_s"), since_s), incident
        )

    def standstill_ended(self, event: LoggedEvent, _incident: int) -> None:
        if self._is_of_world(event) and self._cause is TimeCause.STALLED:
            self._become(TimeCause.PRODUCTIVE, 0)

    def _become_stalled(self, from_s: float, incident: int) -> None:
        self._stalled_s = self._ledger.until_s
        self._ledger.replace(from_s, self._stalled_s, TimeCause.STALLED, incident)
        self._become(TimeCause.STALLED, incident)

    def _moves_again(self, event: LoggedEvent) -> bool:
        """Whether the steps of a count were made after a stall, and not only counted after it."""
        is_new = event.time_s - event.measure("age_s") > self._stalled_s
        return self._cause is TimeCause.STALLED and is_new

    def workers_started(self, event: LoggedEvent, _incident: int) -> None:
        if not self._had_world:
            self._entered = _World((event.round, event.attempt), started_s=event.time_s)
        if self._is_of_world(event):
            self._world.started_s = self._ledger.until_s

    def workers_regrouped(self, event: LoggedEvent, _incident: int) -> None:
        if self._is_of_world(event):
            self._world.is_in_place = True

    def workers_training(self, event: LoggedEvent, _incident: int) -> None:
        """Divide the time before the first step by cause, once all nodes have made that step."""
        if not self._had_world and self._entered is not None:
            self._entered.trained.add(event.node)
        if not self._is_of_world(event):
            return
        self._note_steps()
        world = self._world
        had_trained = world.has_trained
        world.trained.add(event.node)
        trained_s = event.time_s - event.measure("age_s")
        world.trained_s = _later(world.trained_s, trained_s)
        if "built_age_s" in event.data:
            world.built_s = _later(world.built_s, event.time_s - event.measure("built_age_s"))
            world.healed_s = _later(world.healed_s, event.time_s - event.measure("healed_age_s"))
        if world.has_trained and not had_trained:
            self._enter_start()

    def restored(self, event: LoggedEvent, _incident: int) -> None:
        """Record the step from which new workers continue.

        The event has no fence, since the snapshot server does not know their world.
        """
        if not self._world.has_trained:
            self._world.restored_step = event.number("step")

    def progress(self, event: LoggedEvent, _incident: int) -> None:
        steps = event.number("steps")
        if steps is None or not self._is_of_world(event):
            return
        self._note_steps()
        before, world = self._highest, self._world
        if not world.has_trained and self._proves_training(steps):
            if world.trained_s is None and world.counts is not None:
                world.trained_s = world.counts[0]
            world.nodes = 0
            world.trained.add(event.node)
            self._enter_start()
        elif self._moves_again(event):
            self._become(TimeCause.PRODUCTIVE, 0)
        if self._cause is TimeCause.RETRIED and world.has_trained:
            self._enter_repeated(event.time_s, steps, before)
        world.counts = event.time_s, steps
        self._highest = max(before, steps)

    def _proves_training(self, steps: int) -> bool:
        """Whether a step count proves that all nodes have made their first step.

        Their events of it may be in logs of their own. Then one that is here has its time.
        """
        world = self._world
        if world.counts is not None and steps > world.counts[1]:
            return True
        return bool(world.trained) and world.nodes > len(self._nodes) and steps > self._highest

    def pace(self, event: LoggedEvent, _incident: int) -> None:
        if not self._is_of_world(event):
            return
        self._find_first_step(event)
        if self._moves_again(event):
            self._become(TimeCause.PRODUCTIVE, 0)

    def _find_first_step(self, event: LoggedEvent) -> None:
        """Record when new workers made the first step that was measured, as their pace implies."""
        world, made, before = self._world, event.number("made"), event.number("before")
        is_known = world.measured_s is not None or world.is_in_place or world.started_s is None
        if is_known or not made or before is None:
            return
        begun_s = event.time_s - event.measure("seconds") * (1.0 + before / made)
        world.measured_s = max(begun_s, world.started_s or begun_s)

    def paused(self, event: LoggedEvent, _incident: int) -> None:
        """Divide the time in which rank 0 has saved, evaluated or restored.

        Short pauses are reported together, so those of a world that trains are the last productive
        seconds, which may be those of the world before it.
        """
        cause = _PAUSES.get(event.text("what"))
        to_s, seconds = event.time_s - event.measure("age_s"), event.measure("seconds")
        if cause is None:
            return
        if self._world.has_trained and cause is not TimeCause.RESTORING:
            self._ledger.divide_back(to_s, seconds, cause, frozenset({TimeCause.PRODUCTIVE}))
            return
        pause = max(to_s - seconds, self._world.from_s), to_s, cause
        self._pauses.append(pause)
        self._divide(*pause)

    def _divide(self, from_s: float, to_s: float, cause: TimeCause) -> None:
        of = _BEFORE_STEPS if cause is TimeCause.RESTORING else _UNTIL_STEPS
        if from_s < to_s:
            self._ledger.divide(from_s, to_s, cause, of)

    def agent_started(self, event: LoggedEvent, _incident: int) -> None:
        self._agents.add((event.host, event.pid))
        self._nodes.add(event.node)

    def agent_stopped(self, event: LoggedEvent, incident: int) -> None:
        self._agents.discard((event.host, event.pid))
        if not self._agents:
            self._end_world()
            self._world = _World()
            self._become(TimeCause.WAITING, incident)

    def events_lost(self, event: LoggedEvent, _incident: int) -> None:
        from_s = self._logged_s.get((event.host, event.pid), self.from_s)
        self._ledger.replace(from_s, event.time_s, TimeCause.UNKNOWN, 0)

    def _is_of_world(self, event: LoggedEvent) -> bool:
        return (event.round, event.attempt) == self._world.fence and event.round is not None

    def _become(self, cause: TimeCause, incident: int) -> None:
        self._cause, self._incident = cause, incident

    def _enter_start(self) -> None:
        """Replace the time from the world's beginning to its first step."""
        world, ledger, incident = self._world, self._ledger, self._incident
        assert world.trained_s is not None
        until_s = ledger.until_s
        trained_s = min(max(world.trained_s, world.from_s), until_s)
        healed_s = min(max(world.healed_s or trained_s, world.from_s), trained_s)
        built_s = min(max(world.built_s or healed_s, world.from_s), healed_s)
        if incident and not world.is_in_place:
            started_s = min(world.started_s or built_s, built_s)
            ledger.replace(started_s, built_s, TimeCause.STARTING, incident)
        if incident:
            ledger.replace(built_s, healed_s, TimeCause.HEALING, incident)
            if self._fault and world.is_in_place:
                ledger.replace(healed_s, trained_s, TimeCause.RETRIED, incident)
            else:
                ledger.replace(healed_s, trained_s, TimeCause.PRODUCTIVE, 0)
        ledger.replace(trained_s, until_s, TimeCause.PRODUCTIVE, 0)
        for pause in self._pauses:
            self._divide(*pause)
        self._pauses.clear()
        restored, in_place = world.restored_step is not None, world.is_in_place
        repeats = restored and self._fault and not in_place
        self._become(*((TimeCause.RETRIED, incident) if repeats else (TimeCause.PRODUCTIVE, 0)))

    def _enter_repeated(self, now_s: float, steps: int, highest: int) -> None:
        """End the time in which steps from before a restore are repeated."""
        world = self._world
        if steps < highest:
            return
        since_s = world.from_s if world.trained_s is None else world.trained_s
        since_s, count = world.counts or (since_s, world.restored_step or 0)
        share = (highest - count) / (steps - count) if steps > count else 0.0
        back_s = since_s + max(0.0, share) * (now_s - since_s)
        self._ledger.replace(back_s, now_s, TimeCause.PRODUCTIVE, 0)
        self._become(TimeCause.PRODUCTIVE, 0)

    def _end_world(self) -> None:
        """Count the workers' time as productive if the script has reported no step.

        If steps were measured, only the time since the first one; before it the workers start.
        """
        started_s = self._world.started_s
        if self._has_steps or started_s is None:
            return
        self._world.started_s = None  # The world has ended, and so has the work of its workers.
        begun_s = self._world.measured_s or started_s
        for one in tuple(self._ledger.entries):
            if one.to_s > started_s and one.cause in (TimeCause.STARTING, TimeCause.REBUILDING):
                from_s = max(one.from_s, started_s)
                self._assumed.append(Interval(from_s, one.to_s, one.cause, one.incident))
                self._ledger.replace(
                    from_s, min(one.to_s, begun_s), TimeCause.STARTING, one.incident
                )
                self._ledger.replace(max(from_s, begun_s), one.to_s, TimeCause.PRODUCTIVE, 0)

    def _note_steps(self) -> None:
        """Undo the assumption that the script reports no steps, since it has reported one."""
        self._has_steps = True
        for one in self._assumed:
            self._ledger.replace(one.from_s, one.to_s, one.cause, one.incident)
        self._assumed.clear()


def _later(known_s: float | None, time_s: float) -> float:
    return time_s if known_s is None else max(known_s, time_s)


_RULES: dict[str, Callable[[_Machine, LoggedEvent, int], None]] = {
    EventKind.ROUND_SETTLED: _Machine.round_settled,
    EventKind.ROUND_RESUMED: _Machine.world_resumed,
    EventKind.COORDINATOR_AWAY: _Machine.coordinator_away,
    EventKind.WORKER_EXITED: _Machine.worker_exited,
    EventKind.INCIDENT: _Machine.world_failed,
    EventKind.DRAIN_STARTED: _Machine.drain_started,
    EventKind.GROWTH: _Machine.drain_started,
    EventKind.DRAIN_ENDED: _Machine.drain_ended,
    EventKind.WAITING: _Machine.waiting,
    EventKind.STALL: _Machine.stalled,
    EventKind.CULPRIT: _Machine.standstill,
    EventKind.CULPRIT_ENDED: _Machine.standstill_ended,
    EventKind.WORKERS_STARTED: _Machine.workers_started,
    EventKind.WORKERS_REGROUPED: _Machine.workers_regrouped,
    EventKind.WORKERS_TRAINING: _Machine.workers_training,
    EventKind.RESTORED: _Machine.restored,
    EventKind.PROGRESS: _Machine.progress,
    EventKind.PACE: _Machine.pace,
    EventKind.PAUSED: _Machine.paused,
    EventKind.AGENT_STARTED: _Machine.agent_started,
    EventKind.AGENT_STOPPED: _Machine.agent_stopped,
    EventKind.EVENTS_LOST: _Machine.events_lost,
    EventKind.JOB_ENDED: _Machine.job_ended,
}


def _helped(account: Account, incidents: Sequence[IncidentView]) -> tuple[str, ...]:
    """Return, in words, how the lost time could have been shorter."""
    causes = account.causes()
    faults = {one.id for one in incidents if one.kind in ("worker", "node", "failure", "stall")}
    waited_s = causes[TimeCause.WAITING].seconds if TimeCause.WAITING in causes else 0.0
    small_s = sum(
        max(0.0, one.whole_s - one.to_s)
        for one in incidents
        if one.kind == "worker" and one.to_s is not None and one.whole_s is not None
    )
    repeated_s = sum(
        one.seconds
        for one in account.intervals
        if one.cause is TimeCause.RETRIED and one.incident in faults
    )
    found = (
        (waited_s, "waiting for nodes: another node, or a lower --nnodes MIN"),
        (small_s, "with fewer workers until replacements were ready: --spares-per-node 1"),
        (repeated_s, "repeating steps: with a restart, a shorter checkpoint interval"),
    )
    least_s = max(HELP_S, HELP_SHARE * account.wall_s)
    return tuple(f"{seconds:.1f} s {text}" for seconds, text in found if seconds >= least_s)


def missing_of(account: Account) -> str:
    """Return, in words, why an account is not of the whole run; empty if it is."""
    if account.missing_s <= 0.0:
        return ""
    return f"without the {account.missing_s:.2f} s before: {_WAS_NOT_HERE}"


def account_lines(account: Account | None) -> list[str]:
    """Return the account for people: one line in all, one for each cause, and the proposals.

    None: why there is no account.
    """
    if account is None:
        return [f"goodput not known: {NOT_HERE}"]
    lines = [f"goodput {account.goodput:.1%} of {account.wall_s:.2f} s"]
    missing = missing_of(account)
    if missing:
        lines.append(f"  {missing}")
    for cause, of in account.causes().items():
        lost = sorted(of.incidents.items(), key=lambda item: -item[1])[:INCIDENTS_SHOWN]
        where = ", ".join(f"#{number} {seconds:.2f} s" for number, seconds in lost)
        where += (
            f" and {len(of.incidents) - len(lost)} more" if len(of.incidents) > len(lost) else ""
        )
        share = of.seconds / account.wall_s if account.wall_s > 0 else 0.0
        line = f"  {cause:<18}{of.seconds:10.2f} s {share:6.1%}"
        lines.append(f"{line}  incidents {where}" if where else line)
    return lines + [f"  would help        {text}" for text in account.helped]
