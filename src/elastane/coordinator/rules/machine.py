"""The coordinator's state machine: facts arrive as events, level-triggered rules decide.

Theory of operation. An event only records a fact (`admission`, `reports`, `liveness`). Then the
rule of the current phase runs, and again after each change of phase, until nothing changes. So no
fact is lost because it arrived in another phase. A coordinator without authority records facts and
decides nothing until it has authority again.

The phases, and what moves the job from one to another; the first condition that holds decides:

    phase       condition                                              next phase
    ----------  -----------------------------------------------------  ----------------------
    (start)     the record has an outcome                              CLOSING
                the record has a world, and not all were released      RECOVERING
                otherwise                                              FORMING
    (any)       an agent asked to end the job                          CLOSING
    RECOVERING  all members are back with their workers                RUNNING
                the time is over, some are back                        REGROUPING or STOPPING
                the time is over, none is back                         FORMING
    FORMING     a node has workers of the current world, or agents     RECOVERING
                report a world that is not on record
                enough nodes, and the last call or wait is over        RUNNING
                too few nodes for join_timeout, or no replica fits     CLOSING
    RUNNING     too many stalls in a row                               CLOSING
                an incident: failure, departure, stall, lost peer      REGROUPING or STOPPING
                all workers succeeded                                  CLOSING
                a partial replica, and all members are level           REGROUPING
                nodes leave, arrive, or exceed the maximum             DRAINING
    DRAINING    an unplanned incident                                  REGROUPING or STOPPING
                all workers succeeded before they were asked           CLOSING
                in place, and all workers finished their steps         RUNNING
                all workers checkpointed, or the drain timed out       REGROUPING or STOPPING
    REGROUPING  a lost worker alone held part of the state             STOPPING
                no survivor is left, or the others finished            STOPPING
                enough workers can enter the next world                RUNNING
                too few for join_timeout, the budget refuses,          CLOSING
                or no replica fits
    STOPPING    all workers are stopped, and the budget refuses        CLOSING
                all workers are stopped                                FORMING
    CLOSING     all agents know the outcome, or had CLOSE_S            CLOSED

"REGROUPING or STOPPING" is `_end_world`: REGROUPING if the workers recover in place and survivors
hold the state, otherwise STOPPING.

A `Persist` stands in the effects before any message that depends on it: a committed world before
its `Assign`, a charged restart before its `Prepare` or the next `Assign`, an outcome before its
`Close`, the last release before its `Release`. Stopping and interrupting need no record, since they
are safe to repeat.
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

# The longest chain of phases in one call is recovering, stopping, forming, running. A longer one
# means that two rules contradict each other.
_STEPS_MAX = 12


class Rendezvous:
    """Membership, restarts and drains of one job.

    `record` is the job's record in the store. `previous_holder` is the node whose coordinator wrote
    it last, if that coordinator is known to have ended. The same events at the same times give the
    same effects.
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
        """Record `event` at `now_s` (monotonic seconds), and return the effects to perform."""
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
        """Return the agents that are here, and the members of the current world that are not."""
        return status.presence(self._state)

    def _take(self, event: RendezvousEvent) -> bool:
        """Record what `event` says; return whether a rule may now decide otherwise."""
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
                return False  # A tick carries nothing but its time.

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
    """Start a new coordinator from the job's durable record."""
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
        state.wait_until(deadline_s)  # Keeps the return of a large world linear in its size.
        return False
    expected, present = _last_world(state)
    here = {node.id for node in present}
    missing = [node_id for node_id in expected if node_id not in here]
    dead = state_holders.dead_members(state)
    awaited = [node_id for node_id in missing if node_id not in dead]
    if awaited == [state.previous_holder] and any(state.is_member(node) for node in present):
        deadline_s = _await_holder(state, deadline_s)
    # Without any member, the displaced state holders are needed.
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
        # Later failures on the members here follow from the broken world, and are not charged.
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
    """Return until when to wait for the last coordinator's node, once all others are here.

    That node most likely ended with its coordinator, so the wait is short. If the store was away, a
    live coordinator lost its leadership, and its node comes back at the same time as the others.
    """
    if state.holder_due_s is None:
        state.holder_due_s = state.now_s + HOLDER_GRACE_S
    return min(deadline_s, state.holder_due_s)


def _last_world(state: State) -> tuple[list[str], list[KnownNode]]:
    """Return the node ids of the last world, unknown ones made up, and its nodes that are here."""
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
        state.reindex(node)  # Their reports count from now on.
    state.intact = sum(state.is_member(node) for node in present) == state.unrecorded_world.size
    if not state.intact:
        # This is not the membership of that round, so the next world gets another round.
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
        # Before failures are counted: those may follow from the drain.
        drain.begin_drain(state, "continuing the drain that the last coordinator began")
        state.drain_began_earlier = True
    _apply_reported_failures(state)
    return True


def _apply_reported_failures(state: State) -> None:
    """Count the failures that happened while there was no coordinator."""
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
    # After the request to checkpoint, an exit with 0 may only mean that a worker did that.
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
    """End a drain whose workers finished their steps: there is no world left to change."""
    state.incident = None
    state.enter(Phase.RUNNING, "the workers have finished their steps")
    state.log(EventKind.DRAIN_ENDED, state.phase_reason)
    return True


def _end_world(state: State, reason: str) -> bool:
    """Move to the next world, with the same processes if workers recover in place."""
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, reason)
    if state.in_place and (recovery.has_survivors(state) or recovery.may_return(state)):
        return recovery.interrupt_world(state, reason)
    return _stop_world(state, reason)


def _stop_unhealed(state: State, reason: str) -> bool:
    return _stop_world(state, f"{reason}; no other worker holds its part of the state")


def _regrouping(state: State) -> bool:
    assert state.incident is not None
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, state.incident.reason)
    survive = recovery.has_survivors(state)
    if recovery.may_return(state) and (not survive or recovery.is_ending(state)):
        return _await_return(state)
    if not survive and not state.unreachable:
        return _stop_world(state, f"{state.incident.reason}; no survivor is left")
    if recovery.is_ending(state):
        return _stop_world(state, f"{state.incident.reason}; others have finished their steps")
    _release_leaving(state)
    if state_holders.must_wait_for_state(state):
        return _await_possibly_training(state)
    return recovery.commit_when_enough(state)


def _await_possibly_training(state: State) -> bool:
    """Wait for state holders out of sight: they come back, or stop themselves in time."""
    reason = (
        f"{named(state.possibly_training)} may hold the state of the job and train where this"
        f" coordinator cannot see it; the others wait, {FENCE_WAIT_S:g} s at most"
    )
    if state.phase_reason != reason:
        state.enter(Phase.REGROUPING, reason)
        state.log(EventKind.WAITING, reason)
    # The wait does not count against join_timeout, so nodes that come during it are in time.
    recovery.prepare_standbys(state)
    state.phase_s = state.now_s
    return False


def _await_return(state: State) -> bool:
    """Wait for workers between two loops of steps, or after the last: they come back or exit."""
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
    """Release the nodes that asked to leave and have no workers any more."""
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
