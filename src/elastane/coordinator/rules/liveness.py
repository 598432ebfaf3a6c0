"""Who is there: broken sessions, silence, and what a departure means.

A session that breaks is a departure once its short grace to come back has passed: the kernel of
a node closes the connections of an agent that dies, so this is nearly always a death. Silence is
judged by the coordinator's own clock alone.
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
    """Take note that a session ended from the other side."""
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
    """Bury those who are away for longer than their grace, or silent for too long."""
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
    """Count `node` out. Where it was a member of the world in force, that is an incident."""
    if node.session is not None:
        state.effects.append(Hangup(node.session, f"counted as departed: {why}"))
    # By the record, not by what it holds: a member that has stopped is still part of the incident.
    member = state.is_of_world(node.id)
    in_force = state.phase in (
        Phase.RUNNING,
        Phase.DRAINING,
        Phase.REGROUPING,
        Phase.STOPPING,
    )
    gone = node.session is None and node.broken_clean
    if node.fence is None or gone or state_holders.is_dead(state, node.spec.incarnation):
        # Its process is gone, and took its workers along.
        state.intact = state.intact and not member
        state_holders.record_ended_workers(state, node, {*node.workers})
    elif member:
        state_holders.note_possibly_training(state, node.id, node.spec.incarnation)
    state.forget(node)
    if state.phase in (Phase.CLOSING, Phase.CLOSED):
        return
    if node.leaving and node.fence is None:
        # It had taken its leave, and went as soon as it could, without a word from here.
        state.log(EventKind.NODE_RELEASED, node.leaving, node.id)
    else:
        state.log(EventKind.NODE_DEPARTED, why, node.id)
    if not (member and in_force):
        return
    ensure_incident(state, f"node {node.id} departed: {why}").departed.append(node.id)


def ensure_incident(state: State, reason: str) -> Incident:
    """Return the incident in hand, which from now on is no longer (only) a planned one."""
    incident = state.incident
    if incident is None or (incident.planned and state.phase is Phase.DRAINING):
        incident = Incident(at_s=state.now_s, reason=reason, planned=False)
        state.incident = incident
        state.log(EventKind.INCIDENT, reason)
    return incident
