"""The machine: facts come in by events, decisions are made by level-triggered rules.

An event only records what is now known (`reports`, `door`, `presence`); then the rule of the
phase is asked, again and again until nothing changes (`phases`). So a fact is never lost by
coming in the wrong phase, and a coordinator without authority can go on gathering facts while
it decides nothing.
"""

from __future__ import annotations

from elastane.coordinator.rules import (
    admission,
    ending,
    fencing,
    liveness,
    phases,
    replica_slices,
    reports,
    resize,
    state_holders,
    status,
)
from elastane.coordinator.rules.budget import RestartBudget
from elastane.coordinator.rules.state import Phase, State
from elastane.protocol.effects import RendezvousEffect
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import AgentPresence, Join, Query, Report
from elastane.protocol.model import JobRecord, JobSpec

# A chain of phases in one call is at most recovering to stopping to forming to running; more is
# a rule that contradicts another.
_STEPS_MAX = 12


class Rendezvous:
    """Membership, restarts and drain of one job.

    `record` is what the store holds of the job, `previous_holder` the node whose coordinator
    wrote it last, where it is known to have ended. Invariant: the same events at the same times
    give the same effects.
    """

    def __init__(
        self,
        spec: JobSpec,
        now_s: float,
        record: JobRecord | None = None,
        *,
        store_backed: bool = False,
        previous_holder: str = "",
    ) -> None:
        budget = RestartBudget(
            allowed=spec.max_restarts, used=record.restarts_used if record else 0
        )
        if record is not None and record.resized:
            spec = spec.sized_as(record.spec)
        self._state = State(spec, budget, store_backed, now_s, now_s)
        self._state.phase_s = now_s
        self._state.previous_holder = previous_holder
        self._state.wake_s = now_s
        if record is not None:
            phases.load_record(self._state, record)

    def handle(self, event: RendezvousEvent, now_s: float) -> list[RendezvousEffect]:
        """Take in `event` at `now_s` (monotonic seconds) and return what is to be done."""
        state = self._state
        assert now_s >= state.now_s, f"time went back from {state.now_s} to {now_s}"
        state.now_s = now_s
        dirty = self._take(event)
        due = state.wake_s is not None and now_s >= state.wake_s
        if dirty or due:
            state.wake_s = None
            self._advance()
        out, state.out = state.out, []
        return out

    @property
    def wake_s(self) -> float | None:
        """When a Tick is needed at the latest, in monotonic seconds; None: never."""
        return self._state.wake_s

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self._state.phase

    @property
    def short_of_nodes_s(self) -> float:
        """For how long there have been too few nodes for a world that follows another."""
        state = self._state
        here = len(state.nodes) - len(state.away)
        if (
            state.phase != Phase.FORMING
            or state.world is None
            or here >= replica_slices.fewest_nodes(state)
        ):
            return 0.0
        return state.now_s - state.phase_s

    def report(self) -> Report:
        """Return what `elastane status` shows."""
        return status.report(self._state)

    def presence(self) -> list[AgentPresence]:
        """Return who is here, and who of the world in force is not."""
        return status.presence(self._state)

    def _take(self, event: RendezvousEvent) -> bool:
        """Record what `event` says; return whether a rule could now decide otherwise."""
        state = self._state
        match event:
            case Received(message=Query()):
                state.out.append(status.answer(state, event.session))
                return False
            case Received(message=Join()):
                admission.handle_join(state, event)
                return True
            case Received():
                return reports.record_message(state, event.session, event.message)
            case Broken():
                liveness.record_broken_session(state, event)
                return True
            case Resized(min_nodes=min_nodes, max_nodes=max_nodes):
                self._state.wanted = (min_nodes, max_nodes)
                return True
            case Fenced(incarnations=incarnations, dead=dead):
                fencing.apply_fencing(state, incarnations, dead)
                return True
            case AuthorityChanged(held=held, reason=reason):
                self._set_authority(held, reason)
                return True
            case _:
                return False  # A tick: its time is what it says.

    def _set_authority(self, held: bool, reason: str) -> None:
        if held == self._state.authority:
            return
        self._state.authority = held
        kind = EventKind.AUTHORITY_REGAINED if held else EventKind.AUTHORITY_LOST
        self._state.tell(kind, reason)

    def _advance(self) -> None:
        state = self._state
        for _ in range(_STEPS_MAX):
            liveness.declare_departures(state)
            admission.resolve_contests(state)
            if not state.authority:
                return
            resize.apply_range(state)
            state_holders.persist_cleared_displaced(state)
            if not ending.concluded(state) and not phases.RULES[state.phase](state):
                return
        raise AssertionError(f"rules contradict one another in phase {state.phase}")
