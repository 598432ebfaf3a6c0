"""Which nodes are alive: broken sessions, silence, and what a departure means.

A broken session is a departure once its reconnect grace has passed. The kernel closes the
connections of an agent that dies, so it nearly always is a death. Silence is measured by the
coordinator's clock alone.
"""

from __future__ import annotations

from elastane.coordinator.rules import state_holders
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.state import KnownNode, Phase, State
from elastane.protocol.effects import Hangup
from elastane.protocol.events import Broken
from elastane.protocol.limits import REJOIN_GRACE_S
from elastane.protocol.log_events import EventKind


def record_broken_session(state: State, event: Broken) -> None:
    """Record that the peer ended a session."""
    for contested, contest in [*state.contests.items()]:
        if contest.join.session == event.session:
            del state.contests[contested]
    node_id = state.by_session.pop(event.session, None)
    if node_id is None:
        return
    node = state.nodes[node_id]
    node.session, node.broken_s = None, state.now_s
    node.broken_reason, node.broken_clean = event.reason, event.clean
    state.reindex(node)
    state.liveness_due_s = min(state.liveness_due_s, state.now_s + REJOIN_GRACE_S)


def declare_departures(state: State) -> None:
    """Declare nodes departed once their reconnect grace has passed, or after too long a silence."""
    if state.now_s >= state.liveness_due_s:
        for node in [*state.nodes.values()]:
            verdict = _verdict(state, node)
            if verdict:
                depart(state, node, verdict)
        state.liveness_due_s = min(
            (_deadline(state, node) for node in state.nodes.values()), default=float("inf")
        )
    if state.nodes:
        state.wait_until(state.liveness_due_s)


def _deadline(state: State, node: KnownNode) -> float:
    if node.session is None:
        return node.broken_s + REJOIN_GRACE_S
    return node.heard_s + state.spec.timing.silence_s


def _verdict(state: State, node: KnownNode) -> str:
    if state.now_s < _deadline(state, node):
        return ""
    if node.session is None:
        return f"its connection ended: {node.broken_reason}"
    return f"silent for {state.now_s - node.heard_s:.1f} s"


def depart(state: State, node: KnownNode, why: str) -> None:
    """Declare `node` departed; if it was a member of the current world, that is an incident."""
    if node.session is not None:
        state.effects.append(Hangup(node.session, f"counted as departed: {why}"))
    # The record decides: a member that has stopped its workers is still part of the incident.
    member = state.is_of_world(node.id)
    has_world = state.phase in (
        Phase.RUNNING,
        Phase.DRAINING,
        Phase.REGROUPING,
        Phase.STOPPING,
    )
    gone = node.session is None and node.broken_clean
    if node.fence is None or gone or state_holders.is_dead(state, node.spec.incarnation):
        # Its process is gone, and its workers with it.
        state.intact = state.intact and not member
        state_holders.record_ended_workers(state, node, {*node.workers})
    elif member:
        state_holders.note_possibly_training(state, node.id, node.spec.incarnation)
    state.forget(node)
    if state.phase in (Phase.CLOSING, Phase.CLOSED):
        return
    if node.leaving and node.fence is None:
        # It had asked to leave, and went without waiting for its release.
        state.log(EventKind.NODE_RELEASED, node.leaving, node.id)
    else:
        state.log(EventKind.NODE_DEPARTED, why, node.id)
    if not (member and has_world):
        return
    ensure_incident(state, f"node {node.id} departed: {why}").departed.append(node.id)


def ensure_incident(state: State, reason: str) -> Incident:
    """Return the current incident, opening an unplanned one unless there is one."""
    incident = state.incident
    if incident is None or (incident.planned and state.phase is Phase.DRAINING):
        incident = Incident(at_s=state.now_s, reason=reason, planned=False)
        state.incident = incident
        state.log(EventKind.INCIDENT, reason)
    return incident
