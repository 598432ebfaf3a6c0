"""The rule of each phase: asked after every event, it acts when its time has come.

A rule returns True when it entered another phase, whose rule is then asked in turn.

    RECOVERING -> RUNNING (all are back) | STOPPING (some are) | FORMING (none is)
    FORMING    -> RUNNING (settled) | CLOSING (nobody came in time)
    RUNNING    -> STOPPING (a fault) | DRAINING (a planned change) | CLOSING (all succeeded)
                  | REGROUPING (a fault, where workers recover in place)
    DRAINING   -> STOPPING | REGROUPING
    REGROUPING -> RUNNING (enough are left) | STOPPING (none is) | CLOSING
    STOPPING   -> FORMING | CLOSING (the restart budget is used up)
    CLOSING    -> CLOSED
"""

from __future__ import annotations

from collections.abc import Callable

from elastane.coordinator.rules import (
    ending,
    forming,
    liveness,
    recovery,
    replica_slices,
    reports,
    resize,
    state_holders,
)
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.ranks import member_of
from elastane.coordinator.rules.state import KnownNode, Phase, State
from elastane.coordinator.rules.words import named
from elastane.protocol.effects import Finished
from elastane.protocol.limits import (
    CLOSE_S,
    FENCE_WAIT_S,
    HOLDER_GRACE_S,
    STALLS_MAX,
    STOP_MARGIN_S,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drain, DrainTarget, Release
from elastane.protocol.model import Fence, JobRecord, World


def load_record(state: State, record: JobRecord) -> None:
    """Take up a job from its durable record, in a new coordinator."""
    state.versions, state.world, state.outcome = record.versions, record.world, record.outcome
    state.resized = record.resized
    state.kept = {node_id: rank for rank, node_id in enumerate(record.kept)}
    state.kept_is_recorded = bool(record.kept)
    if record.outcome is not None:
        state.closes_anew = True
        state.enter(Phase.CLOSING, f"the job has ended: {record.outcome.reason}")
    elif record.world is not None and record.over:
        state.over = True
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
    size = len(state.world.members) if state.world else state.claim.size if state.claim else 0
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
    late = alone and any(node_id not in state.nodes for node_id in state.kept)
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
        state.late_s = state.now_s
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
        assert state.claim is not None, "recovering needs a record or a claim"
        seats = state.claim.seats
        ids = [seats.get(rank, f"the node of rank {rank}") for rank in range(state.claim.size)]
    nodes = [state.nodes[i] for i in ids if i in state.nodes and i not in state.away]
    return ids, nodes


def _adopt_claim(state: State, present: list[KnownNode]) -> None:
    assert state.claim is not None, "recovering needs a record or a claim"
    fence = state.claim.fence
    members = [member_of(n.spec, () if n.has_all_places else n.workers) for n in present]
    state.world = World(fence=fence, members=tuple(members))
    for node in [*state.nodes.values()]:
        state.refile(node)  # What they said of themselves counts from now on.
    state.intact = sum(state.is_member(node) for node in present) == state.claim.size
    if not state.intact:
        # Not the membership that this round had: whatever follows is another round.
        state.hold_up(Fence(fence.round, fence.attempt + 1))


def _resume(state: State, present: list[KnownNode]) -> bool:
    state.claim, state.running_s = None, state.now_s
    state.in_place, state.uneven = (
        recovery.is_in_place(state),
        replica_slices.has_partial_replicas(state),
    )
    state.enter(Phase.RUNNING, "all nodes of the world are back; nothing restarts")
    state.tell(EventKind.ROUND_RESUMED, state.phase_reason, nodes=len(present))
    state.persist()
    if any(node.draining for node in present):
        # First: what then failed on others may be its doing.
        begin_drain(state, "going on with the drain that the last coordinator began")
        state.asked = True
    _apply_reported_failures(state)
    return True


def _apply_reported_failures(state: State) -> None:
    """Take in what failed while there was no coordinator."""
    for node in [node for node in state.nodes.values() if not node.stray]:
        failures, node.failures = node.failures, ()
        node.state = "running" if node.state == "failed" else node.state
        recovery.end_if_broken(state, node)
        reports.record_failures(state, node, failures)
        state.refile(node)
    reports.record_earlier_stops(state)


def _running(state: State) -> bool:
    assert state.world is not None
    if state.in_place and state.incident is None:
        recovery.log_stall(state)
        if recovery.end_if_stalled(state) and state.stalls > STALLS_MAX:
            return ending.stalled(state)
    if state.incident is not None or recovery.has_unexplained_peer_loss(state):
        assert state.incident is not None
        return _end_world(state, state.incident.reason)
    if len(state.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.uneven:
        return recovery.end_if_level(state)
    _release_leaving(state)
    recovery.stop_leaving(state)
    recovery.prepare_standbys(state)
    goes_on = not state.in_place or recovery.is_stepping(state)
    if goes_on and (parting := resize.reason_to_shrink(state)):
        return begin_drain(state, parting)
    arrivals = recovery.standbys_due(state) if state.in_place else forming.arrivals_due(state)
    if arrivals:
        return begin_drain(state, f"taking in {named(arrivals)}")
    return False


def begin_drain(state: State, reason: str) -> bool:
    state.incident = Incident(at_s=state.now_s, reason=reason, planned=True)
    state.aimed, state.asked, state.target, state.stops = False, False, None, False
    state.enter(Phase.DRAINING, reason)
    state.tell(EventKind.DRAIN_STARTED, reason)
    for node in state.members():
        node.marked = node.drained = node.draining = False
        state.refile(node)
        send_drain_request(state, node)
    return True


def send_drain_request(state: State, node: KnownNode) -> None:
    """Send what `node` has to know of the drain in hand; again, to one that comes back in it."""
    assert state.world is not None
    fence, timeout_s = state.world.fence, state.spec.timing.drain_timeout_s
    if state.aimed and not node.drained:
        state.send(node, DrainTarget(fence=fence, calls=state.target, stops=state.stops))
    elif not node.marked:
        state.send(node, Drain(fence=fence, timeout_s=timeout_s, reason=state.phase_reason))


def _draining(state: State) -> bool:
    assert state.world is not None and state.incident is not None
    if not state.incident.planned:
        return _end_world(state, state.incident.reason)
    if state.in_place:
        recovery.log_stall(state)
    # Once they are asked to checkpoint, workers that exit with 0 may have done just that.
    asked = state.aimed or state.asked
    if not asked and len(state.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.in_place and not recovery.is_stepping(state):
        return _call_off(state)
    if not state.aimed and not state.unmarked:
        _set_target(state)
    elif state.aimed and state.target is not None and nobody_continues(state) and not state.stops:
        _stop_at_target(state)
    if state.aimed and not state.undrained:
        took_s = state.now_s - state.phase_s
        state.tell(EventKind.DRAIN_ENDED, f"all workers were asked, within {took_s:.2f} s")
        return _end_world(state, state.incident.reason)
    deadline_s = state.phase_s + state.spec.timing.drain_timeout_s
    if state.now_s < deadline_s:
        state.wait_until(deadline_s)
        return False
    state.tell(EventKind.DRAIN_ENDED, f"workers of {named(state.undrained)} did not checkpoint")
    if not nobody_continues(state):
        resize.drained_late(state)
    return _end_world(state, state.incident.reason)


def _call_off(state: State) -> bool:
    """The workers have finished their steps: there is no world to change any more."""
    state.incident = None
    state.enter(Phase.RUNNING, "the workers have finished their steps")
    state.tell(EventKind.DRAIN_ENDED, state.phase_reason)
    return True


def _set_target(state: State) -> None:
    """Let all workers checkpoint at one and the same call, which none of them has passed."""
    assert state.world is not None
    state.aimed = True
    nodes = state.members()
    furthest = max((node.calls or 0 for node in nodes), default=0)
    state.target, state.stops = furthest + 1 if furthest else None, nobody_continues(state)
    for node in nodes:
        send_drain_request(state, node)


def nobody_continues(state: State) -> bool:
    """Whether nobody goes on with what the workers hold: they have to checkpoint it."""
    return not (state.in_place and recovery.has_survivors(state))


def _stop_at_target(state: State) -> None:
    """The last that were to go on leave as well: all checkpoint where they wait."""
    state.stops = True
    for node in state.members():
        node.drained = False
        state.refile(node)
        send_drain_request(state, node)


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
    if not survive and not state.away:
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
        f"{named(state.unseen)} may hold the state of the job and train where this coordinator"
        f" cannot see it; the others wait, {FENCE_WAIT_S:g} s at most"
    )
    if state.phase_reason != reason:
        state.enter(Phase.REGROUPING, reason)
        state.tell(EventKind.WAITING, reason)
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
    for node in [state.nodes[i] for i in sorted(state.holding)]:
        assert node.fence is not None
        state.stop(node, node.fence, reason)
    return True


def _stopping(state: State) -> bool:
    if state.holding:
        deadline_s = state.phase_s + state.spec.timing.shutdown_timeout_s + STOP_MARGIN_S
        if state.now_s < deadline_s:
            state.wait_until(deadline_s)
            return False
        for node in [state.nodes[i] for i in sorted(state.holding)]:
            liveness.depart(state, node, "did not report its workers stopped within the time")
    incident = state.incident
    assert incident is not None
    delay_s, reason = 0.0, incident.reason
    if incident.is_charged and not incident.charged:
        if ending.verdict_pending(state, incident):
            return False
        verdict = ending.charge(state, incident)
        if not verdict.restart:
            return ending.failure(state, incident, verdict.reason)
        delay_s, reason = verdict.delay_s, f"{incident.reason}; {verdict.reason}"
    state.end_incident(reason)
    _release_leaving(state)
    forming.begin_gathering(state, reason, follow_up=True, delay_s=delay_s)
    return True


def _forming(state: State) -> bool:
    _release_leaving(state)
    return forming.commit_when_due(state)


def _release_leaving(state: State) -> None:
    """Let those go who asked to, and have no workers any more."""
    released = [state.nodes[i] for i in sorted(state.leaving - state.holding)]
    if released and len(released) == len(state.nodes):
        state_holders.record_all_released(state)
    for node in released:
        state.send(node, Release(f"drained: {node.leaving}"))
        state.tell(EventKind.NODE_RELEASED, node.leaving, node.id)
        state.forget(node)


def _closing(state: State) -> bool:
    due_s = state.phase_s + CLOSE_S
    if (state.nodes or state.closes_anew) and state.now_s < due_s:
        state.wait_until(due_s)
        return False
    assert state.outcome is not None
    state.enter(Phase.CLOSED, state.outcome.reason)
    state.finished = True
    state.out.append(Finished(state.outcome))
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
