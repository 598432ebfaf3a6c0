"""The machine: facts come in by events, decisions are made by level-triggered rules.

An event only records what is now known (`reports`, `door`, `presence`); then the rule of the
phase is asked, again and again until nothing changes (`phases`). So a fact is never lost by
coming in the wrong phase, and a coordinator without authority can go on gathering facts while
it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from elastane.coordinator.rules import (
    admission,
    drain,
    ending,
    forming,
    liveness,
    recovery,
    reports,
    sizing,
    state_holders,
    status,
)
from elastane.coordinator.rules.incident import Incident, RestartBudget
from elastane.coordinator.rules.ranks import member_of
from elastane.coordinator.rules.state import KnownNode, Phase, State, named
from elastane.protocol.effects import Finished, RendezvousEffect
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
)
from elastane.protocol.limits import (
    CLOSE_S,
    FENCE_WAIT_S,
    HOLDER_GRACE_S,
    STALLS_MAX,
    STOP_MARGIN_S,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    AgentPresence,
    Join,
    Query,
    Release,
    Report,
)
from elastane.protocol.model import Fence, JobRecord, JobSpec, World

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
            load_record(self._state, record)

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
        out, state.effects = state.effects, []
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
        here = len(state.nodes) - len(state.unreachable)
        if (
            state.phase != Phase.FORMING
            or state.world is None
            or here >= sizing.fewest_nodes(state)
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
                state.effects.append(status.answer(state, event.session))
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
                self._state.requested_range = (min_nodes, max_nodes)
                return True
            case Fenced(incarnations=incarnations, dead=dead):
                admission.apply_fencing(state, incarnations, dead)
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
        self._state.log(kind, reason)

    def _advance(self) -> None:
        state = self._state
        for _ in range(_STEPS_MAX):
            liveness.declare_departures(state)
            admission.resolve_contests(state)
            if not state.authority:
                return
            sizing.apply_range(state)
            state_holders.persist_cleared_displaced(state)
            if not ending.concluded(state) and not RULES[state.phase](state):
                return
        raise AssertionError(f"rules contradict one another in phase {state.phase}")


def load_record(state: State, record: JobRecord) -> None:
    """Take up a job from its durable record, in a new coordinator."""
    state.versions, state.world, state.outcome = record.versions, record.world, record.outcome
    state.resized = record.resized
    state.displaced = {node_id: rank for rank, node_id in enumerate(record.kept)}
    state.displaced_on_record = bool(record.kept)
    if record.outcome is not None:
        state.ended_before = True
        state.enter(Phase.CLOSING, f"the job has ended: {record.outcome.reason}")
    elif record.world is not None and record.over:
        state.all_released = True
        state.phase_reason = f"all nodes of {record.world.fence} had been released"
    elif record.world is not None:
        state.intact = True
        state.enter(
            Phase.RECOVERING,
            f"a new coordinator waits for the {len(record.world.members)} nodes of"
            f" {record.world.fence}",
        )


def _recovering(state: State) -> bool:
    deadline_s = state.phase_s + state.spec.timing.reregister_s
    size = (
        len(state.world.members)
        if state.world
        else state.unrecorded_world.size
        if state.unrecorded_world
        else 0
    )
    if len(state.nodes) + len(state.dead) < size - 1 and state.now_s < deadline_s:
        state.wait_until(deadline_s)  # Keeps the return of a large world linear.
        return False
    expected, present = _last_world(state)
    here = {node.id for node in present}
    missing = [node_id for node_id in expected if node_id not in here]
    dead = state_holders.dead_members(state)
    awaited = [node_id for node_id in missing if node_id not in dead]
    if awaited == [state.previous_holder] and any(state.is_member(node) for node in present):
        deadline_s = _await_holder(state, deadline_s)
    # Where nobody has workers of it, those who gave their places up to it are needed.
    alone = not any(state.is_member(node) for node in present)
    late = alone and any(node_id not in state.nodes for node_id in state.displaced)
    if (awaited or late) and state.now_s < deadline_s:
        state.wait_until(deadline_s)
        return False
    if state.world is None:
        _adopt_claim(state, present)
    holders = [n for n in present if state.is_member(n)]
    if state.intact and not missing and len(holders) == len(present):
        return _resume(state, present)
    if holders or any(
        state_holders.is_displaced_holder(state, node) for node in state.nodes.values()
    ):
        without = [node.id for node in present if not state.is_member(node)]
        lost = named(missing) or f"workers of {named(without) or 'other nodes'}"
        how = "did not come back to the coordinator within the time"
        how = how if awaited or not missing else "ended, as the job's owner says"
        reason = f"{lost} {how}"
        # Whatever now fails on those that did, their world had been broken up before.
        gone = missing + without or ["others"]
        state.incident = Incident(at_s=state.now_s, reason=reason, planned=False, departed=gone)
        state.in_place, state.phase = recovery.is_in_place(state), Phase.RUNNING
        agents = {m.node_id: m.incarnation for m in state.world.members} if state.world else {}
        for node_id in missing:
            state_holders.note_possibly_training(state, node_id, agents.get(node_id, ""))
        state.resumed_without_s = state.now_s
        _apply_reported_failures(state)
        return _end_world(state, reason)
    forming.begin_gathering(
        state, "none of the last world's workers is left", follow_up=bool(present)
    )
    return True


def _await_holder(state: State, deadline_s: float) -> float:
    """Return until when the node of the last coordinator is waited for, all others being here.

    It has most likely ended with its coordinator, and is not waited for as long as another would
    be. But where the store was away, a coordinator that lives loses its seat: then its node comes
    back at the same time as the others.
    """
    if state.holder_due_s is None:
        state.holder_due_s = state.now_s + HOLDER_GRACE_S
    return min(deadline_s, state.holder_due_s)


def _last_world(state: State) -> tuple[list[str], list[KnownNode]]:
    """Return the ids that the last world had (unknown ones made up), and who of them is here."""
    if state.world is not None:
        ids = [m.node_id for m in state.world.members]
    else:
        assert state.unrecorded_world is not None, "recovering needs a record or a claim"
        seats = state.unrecorded_world.node_ids
        ids = [
            seats.get(rank, f"the node of rank {rank}")
            for rank in range(state.unrecorded_world.size)
        ]
    nodes = [state.nodes[i] for i in ids if i in state.nodes and i not in state.unreachable]
    return ids, nodes


def _adopt_claim(state: State, present: list[KnownNode]) -> None:
    assert state.unrecorded_world is not None, "recovering needs a record or a claim"
    fence = state.unrecorded_world.fence
    members = [member_of(n.spec, () if n.has_all_in_world else n.workers) for n in present]
    state.world = World(fence=fence, members=tuple(members))
    for node in [*state.nodes.values()]:
        state.reindex(node)  # What they said of themselves counts from now on.
    state.intact = sum(state.is_member(node) for node in present) == state.unrecorded_world.size
    if not state.intact:
        # Not the membership that this round had: whatever follows is another round.
        state.note_fence(Fence(fence.round, fence.attempt + 1))


def _resume(state: State, present: list[KnownNode]) -> bool:
    state.unrecorded_world, state.world_began_s = None, state.now_s
    state.in_place, state.partial_replicas = (
        recovery.is_in_place(state),
        sizing.has_partial_replicas(state),
    )
    state.enter(Phase.RUNNING, "all nodes of the world are back; nothing restarts")
    state.log(EventKind.ROUND_RESUMED, state.phase_reason, nodes=len(present))
    state.persist()
    if any(node.draining for node in present):
        # First: what then failed on others may be its doing.
        drain.begin_drain(state, "going on with the drain that the last coordinator began")
        state.drain_began_earlier = True
    _apply_reported_failures(state)
    return True


def _apply_reported_failures(state: State) -> None:
    """Take in what failed while there was no coordinator."""
    for node in [node for node in state.nodes.values() if not node.stale]:
        failures, node.failures = node.failures, ()
        node.state = "running" if node.state == "failed" else node.state
        recovery.end_if_broken(state, node)
        reports.record_failures(state, node, failures)
        state.reindex(node)
    reports.record_earlier_stops(state)


def _running(state: State) -> bool:
    assert state.world is not None
    if state.in_place and state.incident is None:
        recovery.log_stall(state)
        if recovery.end_if_stalled(state) and state.stalled_worlds > STALLS_MAX:
            return ending.stalled(state)
    if state.incident is not None or recovery.has_unexplained_peer_loss(state):
        assert state.incident is not None
        return _end_world(state, state.incident.reason)
    if len(state.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.partial_replicas:
        return recovery.end_if_level(state)
    _release_leaving(state)
    recovery.stop_leaving(state)
    recovery.prepare_standbys(state)
    goes_on = not state.in_place or recovery.is_stepping(state)
    if goes_on and (parting := sizing.reason_to_shrink(state)):
        return drain.begin_drain(state, parting)
    arrivals = recovery.standbys_due(state) if state.in_place else forming.arrivals_due(state)
    if arrivals:
        return drain.begin_drain(state, f"taking in {named(arrivals)}")
    return False


def _draining(state: State) -> bool:
    assert state.world is not None and state.incident is not None
    if not state.incident.planned:
        return _end_world(state, state.incident.reason)
    if state.in_place:
        recovery.log_stall(state)
    # Once they are asked to checkpoint, workers that exit with 0 may have done just that.
    asked = state.drain_target_sent or state.drain_began_earlier
    if not asked and len(state.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.in_place and not recovery.is_stepping(state):
        return _call_off(state)
    if not state.drain_target_sent and not state.unmarked:
        drain.set_target(state)
    elif (
        state.drain_target_sent
        and state.drain_target is not None
        and drain.nobody_continues(state)
        and not state.drain_stops_all
    ):
        drain.stop_at_target(state)
    if state.drain_target_sent and not state.undrained:
        took_s = state.now_s - state.phase_s
        state.log(EventKind.DRAIN_ENDED, f"all workers were asked, within {took_s:.2f} s")
        return _end_world(state, state.incident.reason)
    deadline_s = state.phase_s + state.spec.timing.drain_timeout_s
    if state.now_s < deadline_s:
        state.wait_until(deadline_s)
        return False
    state.log(EventKind.DRAIN_ENDED, f"workers of {named(state.undrained)} did not checkpoint")
    if not drain.nobody_continues(state):
        drain.drained_late(state)
    return _end_world(state, state.incident.reason)


def _call_off(state: State) -> bool:
    """The workers have finished their steps: there is no world to change any more."""
    state.incident = None
    state.enter(Phase.RUNNING, "the workers have finished their steps")
    state.log(EventKind.DRAIN_ENDED, state.phase_reason)
    return True


def _end_world(state: State, reason: str) -> bool:
    """Go on to the next world; with the same processes, where they recover in place."""
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, reason)
    if state.in_place and (recovery.has_survivors(state) or recovery.may_return(state)):
        return recovery.interrupt_world(state, reason)
    return _stop_world(state, reason)


def _stop_unhealed(state: State, reason: str) -> bool:
    return _stop_world(state, f"{reason}; nobody else holds what it held")


def _regrouping(state: State) -> bool:
    assert state.incident is not None
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, state.incident.reason)
    survive = recovery.has_survivors(state)
    if recovery.may_return(state) and (not survive or recovery.is_ending(state)):
        return _await_return(state)
    if not survive and not state.unreachable:
        return _stop_world(state, f"{state.incident.reason}; no worker is left that goes on")
    if recovery.is_ending(state):
        return _stop_world(state, f"{state.incident.reason}; others have finished their steps")
    _release_leaving(state)
    if state_holders.must_wait_for_state(state):
        return _await_possibly_training(state)
    return recovery.commit_when_enough(state)


def _await_possibly_training(state: State) -> bool:
    """Those who hold the state may go on out of sight: they come back, or stop themselves."""
    reason = (
        f"{named(state.possibly_training)} may hold the state of the job and train where this"
        f" coordinator cannot see it; the others wait, {FENCE_WAIT_S:g} s at most"
    )
    if state.phase_reason != reason:
        state.enter(Phase.REGROUPING, reason)
        state.log(EventKind.WAITING, reason)
    # Nobody who comes meanwhile comes too late; who is to come has the whole time after this wait.
    recovery.prepare_standbys(state)
    state.phase_s = state.now_s
    return False


def _await_return(state: State) -> bool:
    """Workers are between two loops of steps, or behind the last: they come back, or they exit."""
    assert state.incident is not None
    until_s = state.phase_s + state.spec.timing.join_timeout_s
    if state.now_s >= until_s:
        reason = f"{state.incident.reason}; others have finished their steps, and do not exit"
        return _stop_world(state, reason)
    state.wait_until(until_s)
    return False


def _stop_world(state: State, reason: str) -> bool:
    state.was_in_place = state.was_in_place or state.in_place
    state.in_place = False
    state.enter(Phase.STOPPING, reason)
    for node in [state.nodes[i] for i in sorted(state.with_workers)]:
        assert node.fence is not None
        state.stop(node, node.fence, reason)
    return True


def _stopping(state: State) -> bool:
    if state.with_workers:
        deadline_s = state.phase_s + state.spec.timing.shutdown_timeout_s + STOP_MARGIN_S
        if state.now_s < deadline_s:
            state.wait_until(deadline_s)
            return False
        for node in [state.nodes[i] for i in sorted(state.with_workers)]:
            liveness.depart(state, node, "did not report its workers stopped within the time")
    incident = state.incident
    assert incident is not None
    delay_s, reason = 0.0, incident.reason
    if incident.is_chargeable and not incident.charged:
        if ending.verdict_pending(state, incident):
            return False
        verdict = ending.charge(state, incident)
        if not verdict.restart:
            return ending.failure(state, incident, verdict.reason)
        delay_s, reason = verdict.delay_s, f"{incident.reason}; {verdict.reason}"
    state.finish_incident(reason)
    _release_leaving(state)
    forming.begin_gathering(state, reason, follow_up=True, delay_s=delay_s)
    return True


def _forming(state: State) -> bool:
    _release_leaving(state)
    return forming.commit_when_due(state)


def _release_leaving(state: State) -> None:
    """Let those go who asked to, and have no workers any more."""
    released = [state.nodes[i] for i in sorted(state.leaving - state.with_workers)]
    if released and len(released) == len(state.nodes):
        state_holders.record_all_released(state)
    for node in released:
        state.send(node, Release(f"drained: {node.leaving}"))
        state.log(EventKind.NODE_RELEASED, node.leaving, node.id)
        state.forget(node)


def _closing(state: State) -> bool:
    due_s = state.phase_s + CLOSE_S
    if (state.nodes or state.ended_before) and state.now_s < due_s:
        state.wait_until(due_s)
        return False
    assert state.outcome is not None
    state.enter(Phase.CLOSED, state.outcome.reason)
    state.finished = True
    state.effects.append(Finished(state.outcome))
    return False


def _closed(state: State) -> bool:
    return False


RULES: dict[Phase, Callable[[State], bool]] = {
    Phase.RECOVERING: _recovering,
    Phase.FORMING: _forming,
    Phase.RUNNING: _running,
    Phase.DRAINING: _draining,
    Phase.REGROUPING: _regrouping,
    Phase.STOPPING: _stopping,
    Phase.CLOSING: _closing,
    Phase.CLOSED: _closed,
}
