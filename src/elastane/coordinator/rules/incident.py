"""An incident: the failures that end one world, and the restart budget that pays for them.

Failures of all nodes stand on one time line, the coordinator's. The job has one budget, kept by the
coordinator in its durable record; torchrun has one per agent, which a new agent resets. Departures
and arrivals never use it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec

from elastane.protocol.culprits import Reports
from elastane.protocol.diagnosis import (
    CRASH_SITES_MAX,
    Sighting,
    asks_restart,
    crash_site,
    find_return,
    has_other_mesh,
    is_lost_peer,
    is_state_lost,
    says_mismatch,
    sighting_text,
)
from elastane.protocol.limits import BACKOFF_FIRST_S, BACKOFF_MAX_S, Timing
from elastane.protocol.model import (
    UNUSED,
    CheckpointUse,
    Crash,
    Failure,
    Fence,
    JobRecord,
    NamedWorker,
)
from elastane.protocol.ring import WorkerCalls
from elastane.protocol.verdicts import Verdict
from elastane.protocol.words import counted

# This many attempts in a row that fail alike end the job: the third shows that it is no chance.
SAME_CRASHES_MAX = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """The ranks that called other collectives, in one sentence, and the first of their workers.

    `worker` is None if no rank differs from most.
    """

    sentence: str
    worker: NamedWorker | None


@dataclass(frozen=True, slots=True)
class PastIncident:
    """An incident that is over: its cause in words, and the error of the worker that was the cause.

    `disk_was_full`: the worker failed by that, so that it may explain later failures.
    """

    text: str = ""
    error: str = ""
    disk_was_full: bool = False


@dataclass(slots=True, kw_only=True)
class Incident:
    """Why the current world is ended, and the failures reported since."""

    at_s: float
    reason: str
    planned: bool
    is_missed: bool = False  # it was planned, and not all members reached its step in time
    seen: dict[tuple[str, int], Sighting] = field(default_factory=dict)  # by node id and local rank
    departed: list[str] = field(default_factory=list)
    # The last collectives of workers that were stopped because of it, by node id.
    calls: dict[str, tuple[WorkerCalls, ...]] = field(default_factory=dict)
    charged: bool = False  # the budget was charged for it
    lost_state: bool = False  # a worker reported that its world has lost the state
    other_mesh: bool = False  # workers that joined have a mesh of another size
    asked_restart: bool = False  # a worker ended because all have to restart after a loss
    has_mismatch: bool = False  # it was logged which rank called another collective
    blame: Blame | None = None  # who did, if that was found while the workers stood still
    wait: Verdict | None = None  # for whom the workers of the world waited, if that was reported
    own_causes: int = 0  # failures that none of these explains, nor a lost peer
    why_stopped: str = ""  # why the workers that are left do not recover in place
    cause: PastIncident | None = None  # what is remembered of it, once its cause was found
    follows_loss: bool = False  # a worker or a node was lost since all workers started
    follows_settled: bool = False  # the last change of the world was charged, or cost nothing

    def record(self, node_id: str, failures: tuple[Failure, ...], now_s: float) -> None:
        """Put `failures` of a node on the time line, each once, at its earliest reported time.

        A report arrives after an unknown delay and repeats earlier failures. A repeated failure
        shows by how much this report was slower than the quickest one. All its failures are moved
        back by that, so the failures of one node keep the order that its own clock gave them.
        """
        known = [
            self.seen[node_id, one.local_rank].at_s - (now_s - one.age_s)
            for one in failures
            if (node_id, one.local_rank) in self.seen
        ]
        slower_s = max(0.0, -min(known, default=0.0))
        for failure in failures:
            of, at_s = (node_id, failure.local_rank), now_s - failure.age_s - slower_s
            if of not in self.seen:
                self.seen[of] = Sighting(node_id=node_id, at_s=at_s, failure=failure)
                self._count_cause(failure)
            elif at_s < self.seen[of].at_s:
                self.seen[of] = msgspec.structs.replace(self.seen[of], at_s=at_s)

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """The failures, in the order in which they were reported."""
        return tuple(self.seen.values())

    @property
    def may_differ(self) -> bool:
        """Whether workers may have failed since one called another collective than the others."""
        return any(says_mismatch(s.failure) or is_lost_peer(s.failure) for s in self.sightings)

    def note_calls(self, node_id: str, calls: tuple[WorkerCalls, ...]) -> None:
        """Record the last collectives of the workers that a node has stopped."""
        self.calls[node_id] = calls

    def charge(self) -> None:
        """Record that the budget was charged, or that no charge is due."""
        self.charged = True

    def explain(self, cause: PastIncident) -> None:
        """Record the root cause."""
        self.cause = cause

    def note_mismatch(self) -> None:
        """Record that the rank that called another collective was logged."""
        self.has_mismatch = True

    def blame_departure(self, node_id: str) -> None:
        """Record that a node departed or lost its workers: the incident is not charged."""
        self.departed.append(node_id)

    def become_unplanned(self) -> None:
        """Record that the planned change was not reached at one step of all members."""
        self.planned, self.is_missed = False, True

    @property
    def is_chargeable(self) -> bool:
        """Whether it is charged to the restart budget, as only failures of workers are.

        Four kinds are free: a planned change; a lost state, if earlier incidents lost the workers
        that held it, and a restart that an earlier loss demands, once that loss is settled; and a
        mesh of another size, since it shows that the job has grown.
        """
        if self.planned or self.departed or not self.seen:
            return False
        explained = self.lost_state and self.follows_loss
        explained = (explained or self.asked_restart) and self.follows_settled
        return self.own_causes > 0 or not (explained or self.other_mesh)

    def explain_stop(self, why: str) -> None:
        """Record why the workers that are left do not recover in place."""
        self.why_stopped = why

    def follow(self, *, loss: bool, settled: bool) -> None:
        """Record whether an earlier incident lost a worker or a node, and its state with it.

        `settled`: the last change of the world was charged, or cost nothing.
        """
        self.follows_loss, self.follows_settled = loss, settled

    @property
    def only_asks_restart(self) -> bool:
        """Whether its workers ended only for all to restart, as an earlier incident demands."""
        return self.asked_restart and not (self.own_causes or self.departed)

    def _count_cause(self, failure: Failure) -> None:
        if is_state_lost(failure):
            self.lost_state = True
        elif has_other_mesh(failure):
            self.other_mesh = True
        elif asks_restart(failure):
            self.asked_restart = True
        elif not is_lost_peer(failure):
            self.own_causes += 1


class BudgetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The budget's answer to one more failure."""

    restart: bool
    delay_s: float
    reason: str

    @property
    def pause(self) -> str:
        """The pause before the restart as the end of a sentence; "" without one."""
        return f", after a pause of {self.delay_s:g} s against a crash loop" if self.delay_s else ""


class RestartBudget(msgspec.Struct, kw_only=True):
    """Restarts used of those allowed, and the current run of quick failures.

    `crashes` counts the attempts in a row that ended with the error `crash` at the same step.
    `charged` is the world of the last charge, `charged_before` that of an earlier coordinator's.
    """

    allowed: int
    used: int = 0
    quick_failures: int = 0
    crash: Crash | None = None
    crashes: int = 0
    charged: Fence | None = None
    charged_before: Fence | None = None

    @classmethod
    def of(cls, allowed: int, record: JobRecord | None) -> Self:
        """Return the budget of a new coordinator, which continues that of the record."""
        if record is None:
            return cls(allowed=allowed)
        return cls(
            allowed=allowed,
            used=record.restarts_used,
            quick_failures=record.quick_failures,
            crash=record.crash,
            crashes=record.crashes,
            charged=record.charged,
            charged_before=record.charged,
        )

    @property
    def last_met(self) -> int:
        """The round of the world of the last failure that counts; 0: none since all started."""
        return 0 if self.crash is None else self.crash.met

    def start_afresh(self) -> None:
        """Record that all workers start again: the next failure is one of another attempt."""
        if self.crash is not None:
            self.crash = msgspec.structs.replace(self.crash, met=0)

    def find_charge(self, world: Fence) -> BudgetVerdict | None:
        """Return the verdict on an incident that an earlier coordinator charged; None: it did not.

        That coordinator may have ended before any agent heard of its decision.
        """
        if self.charged_before != world:
            return None
        self.charged_before = None
        reason = f"restart {self.used} of {self.allowed}, charged by an earlier coordinator"
        return BudgetVerdict(restart=True, delay_s=0.0, reason=reason)

    def note_used(self, used: int) -> None:
        """Record that an earlier coordinator used that many restarts."""
        self.used = max(self.used, min(used, self.allowed))

    def charge(
        self,
        lived_s: float,
        timing: Timing,
        crash: Crash | None = None,
        refused: str = "",
        *,
        has_retried: bool = True,
    ) -> BudgetVerdict:
        """Use one restart for an attempt that failed after `lived_s` seconds.

        A life shorter than `crash_loop_s` is a quick failure. The first one restarts at once; from
        the second in a row, a pause doubles up to its bound. The same `crash` SAME_CRASHES_MAX
        times in a row gets no restart, each sooner than `same_crash_s` unless its steps show; nor
        does what elastane refuses, by the error `refused`. `has_retried`: the attempt tried what
        failed before; one that did not neither counts nor breaks the row. An exhausted budget
        counts nothing more.
        """
        self.quick_failures = self.quick_failures + 1 if lived_s < timing.crash_loop_s else 0
        repeated = self._count_attempt(lived_s, timing, crash) if has_retried else ""
        if refused and timing.same_crash_s:
            reason = (
                f"elastane refuses what the script does, in each attempt [{refused}], so no other"
                " one is started; --rdzv-conf same_crash=0 restarts all the same"
            )
            return BudgetVerdict(restart=False, delay_s=0.0, reason=reason)
        if self.used >= self.allowed:
            reason = self._exhausted(timing.crash_loop_s)
            return BudgetVerdict(restart=False, delay_s=0.0, reason=reason)
        if repeated:
            return BudgetVerdict(restart=False, delay_s=0.0, reason=repeated)
        self.used += 1
        verdict = BudgetVerdict(
            restart=True, delay_s=self._delay_s(), reason=f"restart {self.used} of {self.allowed}"
        )
        return msgspec.structs.replace(verdict, reason=verdict.reason + verdict.pause)

    def note_free_restart(
        self, use: CheckpointUse, lived_s: float, timing: Timing, crash: Crash | None
    ) -> str:
        """Record a restart that is not charged; return why there is none, or an empty string.

        `crash` is the one that led to it, if its replacement was charged before. Without one, the
        next attempt may continue from the checkpoint of this one, which breaks the row.
        """
        if crash is not None:
            return self._count_attempt(lived_s, timing, msgspec.structs.replace(crash, use=use))
        if use.written:
            self._count_crash(None)
        return ""

    def _count_attempt(self, lived_s: float, timing: Timing, crash: Crash | None) -> str:
        """Count an attempt that failed; return why no other one is started, or an empty string."""
        shows = crash is not None and crash.steps > 0 and timing.same_crash_s > 0
        self._count_crash(crash if shows or lived_s < timing.same_crash_s else None)
        if self.crash is None or self.crashes < SAME_CRASHES_MAX:
            return ""
        steps = self.crash.steps
        when = f"after {counted(steps, 'step')}" if steps else "before any step showed"
        return (
            f"{self.crashes} attempts in a row failed {when} in the same way"
            f" ({self.crash.sites[0]}), without a newer checkpoint to continue from, so"
            " no other one is started; --rdzv-conf same_crash=0 restarts all the same"
        )

    def _count_crash(self, crash: Crash | None) -> None:
        same = crash.repeats(self.crash) if crash is not None else None
        self.crashes = self.crashes + 1 if same is not None else int(crash is not None)
        self.crash = same or crash

    def _delay_s(self) -> float:
        if self.quick_failures < 2:
            return 0.0
        # The exponent is bounded so that a float never overflows in a very long loop.
        doubled: float = BACKOFF_FIRST_S * 2.0 ** min(self.quick_failures - 2, 16)
        return min(BACKOFF_MAX_S, doubled)

    def _exhausted(self, crash_loop_s: float) -> str:
        if self.allowed == 0:
            return "no restarts are allowed (--max-restarts 0)"
        loop = (
            f"; a crash loop: the last {self.quick_failures} attempts each failed"
            f" within {crash_loop_s:g} s of their start"
            if self.quick_failures > 1
            else ""
        )
        used = "the one restart" if self.allowed == 1 else f"all {self.allowed} restarts"
        return f"{used} of the job {'is' if self.allowed == 1 else 'are'} used{loop}"


@dataclass(slots=True)
class Stalls:
    """Worlds whose workers only wait for one another."""

    text: str = ""  # where all workers of the current world wait, once they do
    unreached: str = ""  # which nodes do not reach which, in words
    in_a_row: int = 0  # stalled worlds in a row, without a step between
    since_s: float = 0.0  # when the first of them ended
    _step: int = 0  # the step at the last of them

    def note(self, text: str, unreached: str) -> None:
        """Record where all workers wait, and whom they do not reach; empty: some do not wait."""
        self.text, self.unreached = f"{text}; {unreached}" if unreached else text, unreached

    def count(self, step: int, now_s: float) -> None:
        """Record that a world stalled at `step`."""
        self.in_a_row = 1 if self.is_first(step) else self.in_a_row + 1
        self.since_s = now_s if self.in_a_row == 1 else self.since_s
        self._step = step

    def is_first(self, step: int) -> bool:
        """Whether steps were made since the last stalled world, or there was none."""
        return step > self._step or not self.in_a_row


@dataclass(slots=True)
class Standstill:
    """The findings about workers that stand still."""

    reports: Reports = field(default_factory=Reports)
    is_new: bool = False  # an agent has reported since the last comparison
    since_s: float = 0.0
    again_s: float | None = None  # when to compare again, since such a wait has passed before
    mismatch: Blame | None = None  # these workers recover in place, and can make no step
    awaited: str = ""  # for whom the others wait, as that worker's own agent found
    awaited_s: float = 0.0

    def is_to_be_compared(self, now_s: float) -> bool:
        """Whether an agent has reported, or a wait lasts longer than one that has passed."""
        return self.is_new or (self.again_s is not None and now_s >= self.again_s)

    def compare_again(self, at_s: float) -> None:
        """Record when to compare the same reports again."""
        self.again_s = at_s

    def forget(self) -> None:
        """Record that other workers, or other places, come next."""
        self.reports.forget()
        self.is_new, self.again_s, self.mismatch = False, None, None
        self.awaited = ""

    def wait_for(self, sentence: str, now_s: float) -> None:
        """Record for whom the others wait, as that worker's own agent found."""
        self.awaited, self.awaited_s = sentence, now_s

    def move(self, moved_s: float) -> None:
        """Record the time of the newest step; one after the agent's report ends the wait."""
        if moved_s > self.awaited_s:
            self.awaited = ""

    def blame(self, found: Blame) -> None:
        """Record who called another collective than the others."""
        self.mismatch = found

    def note(self) -> None:
        """Record that an agent has reported what its workers show."""
        self.is_new = True

    def compared(self, since_s: float) -> None:
        """Record that the reports were compared; the workers stand still since `since_s`."""
        self.is_new, self.again_s, self.since_s = False, None, since_s


@dataclass(frozen=True, slots=True)
class EndedWorld:
    """Why a world ended for which workers may have to restart.

    `sightings`: the failures, if one of them is the cause. `calls`: the last collectives of its
    other workers, by node id. `has_mismatch`: it was logged which rank called another one.
    """

    reason: str
    sightings: tuple[Sighting, ...]
    fence: Fence
    blame: Blame | None = None
    calls: dict[str, tuple[WorkerCalls, ...]] = field(default_factory=dict)
    has_mismatch: bool = False


@dataclass(slots=True)
class Incidents:
    """The current incident, and evidence of one that no report explains yet."""

    current: Incident | None = None
    # The last unplanned one, but for one that only asks for a restart, ...
    last: PastIncident = PastIncident()
    # ... and the last one with another error than the newest.
    before: PastIncident = PastIncident()
    explains: EndedWorld | None = None  # the same since all workers started
    has_lost: bool = False  # one since all workers started lost a worker or a node
    is_settled: bool = False  # the last change of the world was charged, or cost nothing
    crash_sites: tuple[str, ...] = ()  # of workers that failed since all workers started
    nodes: set[str] = field(default_factory=set)  # of worlds committed since all workers started
    # What workers of each stopped node have done with checkpoints since all workers started.
    uses: dict[str, CheckpointUse] = field(default_factory=dict)
    # How the last lost worker crashed that is replaced while the others make the next steps.
    crash: Crash | None = None
    unpaid: Incident | None = None  # the one whose replacements exceed the budget
    # The workers of this world whose programs have returned, by node id and local rank, ...
    _returned: dict[tuple[str, int], Sighting] = field(default_factory=dict)
    # ... and when a worker reported a lost peer that no other report explains.
    peer_lost_s: float | None = None
    peer_lost_reason: str = ""
    stalls: Stalls = field(default_factory=Stalls)
    standstill: Standstill = field(default_factory=Standstill)

    @classmethod
    def of(cls, record: JobRecord | None) -> Self:
        """Return what a new coordinator knows of the incidents before the record's world."""
        if record is None:
            return cls()
        return cls(has_lost=record.lost, is_settled=record.settled)

    @property
    def is_planned(self) -> bool:
        """Whether all that happened was planned: then all members are at the same step."""
        return self.current is None or self.current.planned

    @property
    def is_state_lost(self) -> bool:
        """Whether a worker of the current world reported that no member holds the state."""
        return self.current is not None and self.current.lost_state

    @property
    def has_other_mesh(self) -> bool:
        """Whether workers that joined have another mesh than those that hold the state."""
        return self.current is not None and self.current.other_mesh

    @property
    def last_reason(self) -> str:
        """The current unplanned incident in words, or the last one."""
        current = self.current
        is_now = current is not None and not current.planned
        return current.reason if current is not None and is_now else self.last.text

    @property
    def stalled(self) -> str:
        """For whom, or where, the workers of the world wait at a standstill; empty: they move."""
        found = self.standstill.reports.current
        return self.standstill.awaited or self.stalls.text if found is None else found.sentence

    def open(self, incident: Incident) -> Incident:
        """Record why the current world ends."""
        self.current = incident
        incident.follow(loss=self.has_lost, settled=self.is_settled)
        return incident

    def drop(self) -> None:
        """Forget the current incident: the world continues, or the job has ended."""
        self.current = None

    def finish(self, why: str, fence: Fence) -> None:
        """Close the incident, since another world follows that of `fence`.

        Only an unplanned one is remembered.
        """
        if self.current is not None and self.current.planned:
            self.is_settled = True
        elif self.current is not None:
            if not (self.current.only_asks_restart and self.explains):
                self.last = self.current.cause or PastIncident(why)
                has_cause = self.current.own_causes and not self.current.departed
                failures = self.current.sightings if has_cause else ()
                blame, calls = self.current.blame, self.current.calls
                is_known = self.current.has_mismatch
                self.explains = EndedWorld(why, failures, fence, blame, calls, is_known)
            self._note_crashes(self.current)
            if self.current.own_causes or self.current.departed:
                self.has_lost = True
                self.is_settled = self.current.charged or bool(self.current.departed)
            elif self.current.is_missed:
                self.is_settled = True
        self.current = None

    def _note_crashes(self, incident: Incident) -> None:
        sites = {crash_site(one.failure) for one in incident.sightings} - {""}
        self.crash_sites = tuple(sorted({*self.crash_sites, *sites})[:CRASH_SITES_MAX])

    def note_use(self, node_id: str, use: CheckpointUse) -> None:
        """Record what the workers of a node that has stopped them did with checkpoints."""
        self.uses[node_id] = use.merge(self.uses.get(node_id, UNUSED))

    def use_by(self, nodes: Iterable[str]) -> CheckpointUse:
        """Return what the workers of these nodes have done with checkpoints."""
        known = (self.uses.get(node, CheckpointUse()) for node in nodes)
        return functools.reduce(CheckpointUse.merge, known, UNUSED)

    def note_crash(self, crash: Crash | None) -> None:
        """Record how the last lost worker that is replaced failed; None: not by the script."""
        self.crash = crash

    def explain(self, incident: Incident, cause: PastIncident) -> None:
        """Record the root cause of an incident, which may repeat the error of the last one."""
        incident.explain(cause)
        if not cause.error or cause.error != self.last.error:
            self.before = self.last

    def start_afresh(self) -> None:
        """Record that all workers start again, from the checkpoint."""
        self.crash_sites, self.crash = (), None
        self.uses.clear()
        self.nodes.clear()
        self.has_lost = self.is_settled = False
        self.explains = None

    def commit_world(self, nodes: Iterable[str]) -> None:
        """Forget the evidence against the world before the one of these nodes."""
        self.nodes.update(nodes)
        self.unpaid, self.peer_lost_s = None, None
        self._returned.clear()
        self.standstill.forget()

    def refuse_payment(self, incident: Incident) -> None:
        """Record that the budget pays for no replacement of this incident."""
        self.unpaid = incident

    def note_mismatch(self) -> None:
        """Record that the rank was logged that called another collective in the last world."""
        assert self.explains is not None
        self.explains = replace(self.explains, has_mismatch=True)

    def note_return(self, node_id: str, end: Failure, now_s: float) -> None:
        """Record that the program of a worker has returned."""
        ended = Sighting(node_id=node_id, at_s=now_s - end.age_s, failure=end)
        self._returned.setdefault((node_id, end.local_rank), ended)

    def find_return(self) -> Sighting | None:
        """Return the program that returned first if it explains the current incident."""
        return find_return(self.current.sightings if self.current else (), self.returned)

    @property
    def returned(self) -> tuple[Sighting, ...]:
        """The workers of this world whose programs have returned."""
        return tuple(self._returned.values())

    def returned_of(self, node_id: str) -> set[int]:
        """Return the local ranks of a node whose programs have returned."""
        return {local_rank for node, local_rank in self._returned if node == node_id}

    def explain_by_return(self) -> None:
        """Make the first program that returned the reason of the current incident it explains."""
        found = self.find_return()
        if self.current is not None and found is not None:
            self.current.reason = sighting_text(found)

    def note_lost_peer(self, now_s: float, reason: str) -> None:
        """Record that a worker lost a peer; the first one counts."""
        if self.peer_lost_s is None:
            self.peer_lost_s, self.peer_lost_reason = now_s, reason
