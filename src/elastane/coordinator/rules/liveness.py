"""Which nodes are alive: broken sessions, silence, and what a departure means.

A broken session is a departure once its reconnect grace has passed. The kernel closes the
connections of an agent that dies, so it nearly always is a death. Silence is measured by the
coordinator's clock alone.
"""

from __future__ import annotations

from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import KnownNode
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.effects import Hangup
from elastane.protocol.events import Broken
from elastane.protocol.limits import REJOIN_GRACE_S
from elastane.protocol.log_events import EventKind


def record_broken_session(state: State, event: Broken) -> None:
    """Record that the peer ended a session."""
    if state.roster.end_session(event, state.now_s) is not None:
        state.roster.look_by(state.now_s + REJOIN_GRACE_S)


def declare_departures(state: State) -> None:
    """Declare nodes departed once their reconnect grace has passed, or after too long a silence."""
    if state.now_s >= state.roster.liveness_due_s:
        for node in [*state.roster.nodes.values()]:
            verdict = _verdict(state, node)
            if verdict:
                depart(state, node, verdict)
        deadlines = (_deadline(state, node) for node in state.roster.nodes.values())
        state.roster.look_at(min(deadlines, default=float("inf")))
    if state.roster.nodes:
        state.queue.wait_until(state.roster.liveness_due_s)


def _deadline(state: State, node: KnownNode) -> float:
    if node.session is None:
        return node.connection.broken_s + REJOIN_GRACE_S
    return node.connection.heard_s + state.spec.timing.silence_s


def _verdict(state: State, node: KnownNode) -> str:
    if state.now_s < _deadline(state, node):
        return ""
    if node.session is None:
        return f"its connection ended: {node.connection.broken_reason}"
    return f"silent for {state.now_s - node.connection.heard_s:.1f} s"


def depart(state: State, node: KnownNode, why: str) -> None:
    """Declare `node` departed; if it was a member of the current world, that is an incident."""
    lost_s = node.connection.broken_s if node.session is None else node.connection.heard_s
    age_s = round(max(0.0, state.now_s - lost_s), 4)
    if node.session is not None:
        state.queue.add(Hangup(node.session, f"counted as departed: {why}"))
    # The record decides: a member that has stopped its workers is still part of the incident.
    member = state.worlds.has_place(node.id)
    has_world = state.phase in (
        MembershipPhase.RUNNING,
        MembershipPhase.DRAINING,
        MembershipPhase.REGROUPING,
        MembershipPhase.STOPPING,
    )
    gone = node.session is None and node.connection.broken_clean
    if node.fence is None or gone or state.owner.is_dead(node.spec.incarnation):
        # Its process is gone, and its workers with it.
        if member:
            state.worlds.record_loss()
        state.holders.record_ended_workers(node, {*node.workers.ranks}, state.world)
    elif member:
        note_possibly_training(state, node.id, node.spec.incarnation)
    state.roster.forget(node)
    if state.phase in (MembershipPhase.CLOSING, MembershipPhase.CLOSED):
        return
    if node.leaving and node.fence is None:
        # It had asked to leave, and went without waiting for its release.
        state.log(EventKind.NODE_RELEASED, node.leaving, node.id)
    else:
        spare = {} if member and has_world else {"spare": True}
        state.log(EventKind.NODE_DEPARTED, why, node.id, age_s=age_s, **spare)
    if not (member and has_world):
        return
    ensure_incident(state, f"node {node.id} departed: {why}", age_s).blame_departure(node.id)


def note_possibly_training(state: State, node_id: str, incarnation: str) -> None:
    """Record that workers of this unreachable node may still train."""
    if state.in_place.ever and not state.owner.is_dead(incarnation):
        state.holders.note_possibly_training(node_id, incarnation, state.now_s)


def ensure_incident(state: State, reason: str, age_s: float = 0.0) -> Incident:
    """Return the current incident, opening an unplanned one unless there is one.

    `age_s`: how long ago its cause was, if no event of an agent has that.
    """
    incident = state.incidents.current
    if incident is None or (incident.planned and state.phase is MembershipPhase.DRAINING):
        wait = state.incidents.standstill.reports.current
        incident = Incident(at_s=state.now_s, reason=reason, planned=False, wait=wait)
        incident = state.incidents.open(incident)
        data = {"age_s": age_s} if age_s else {}
        state.log(EventKind.INCIDENT, reason, **data)
    return incident
