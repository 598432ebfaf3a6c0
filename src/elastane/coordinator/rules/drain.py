"""A drain: all workers checkpoint at one and the same call before a planned change."""

from __future__ import annotations

from elastane.coordinator.rules import recovery
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.state import KnownNode, Phase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drain, DrainTarget


def begin_drain(state: State, reason: str) -> bool:
    """Begin a drain of the world in force; always True, for a rule to return."""
    state.incident = Incident(at_s=state.now_s, reason=reason, planned=True)
    (
        state.drain_target_sent,
        state.drain_began_earlier,
        state.drain_target,
        state.drain_stops_all,
    ) = False, False, None, False
    state.enter(Phase.DRAINING, reason)
    state.log(EventKind.DRAIN_STARTED, reason)
    for node in state.members():
        node.marked = node.drained = node.draining = False
        state.reindex(node)
        send_drain_request(state, node)
    return True


def send_drain_request(state: State, node: KnownNode) -> None:
    """Send what `node` has to know of the drain in hand; again, to one that comes back in it."""
    assert state.world is not None
    fence, timeout_s = state.world.fence, state.spec.timing.drain_timeout_s
    if state.drain_target_sent and not node.drained:
        state.send(
            node, DrainTarget(fence=fence, calls=state.drain_target, stops=state.drain_stops_all)
        )
    elif not node.marked:
        state.send(node, Drain(fence=fence, timeout_s=timeout_s, reason=state.phase_reason))


def set_target(state: State) -> None:
    """Let all workers checkpoint at one and the same call, which none of them has passed."""
    assert state.world is not None
    state.drain_target_sent = True
    nodes = state.members()
    furthest = max((node.calls or 0 for node in nodes), default=0)
    state.drain_target, state.drain_stops_all = (
        furthest + 1 if furthest else None,
        nobody_continues(state),
    )
    for node in nodes:
        send_drain_request(state, node)


def nobody_continues(state: State) -> bool:
    """Whether nobody goes on with what the workers hold: they have to checkpoint it."""
    return not (state.in_place and recovery.has_survivors(state))


def stop_at_target(state: State) -> None:
    """The last that were to go on leave as well: all checkpoint where they wait."""
    state.drain_stops_all = True
    for node in state.members():
        node.drained = False
        state.reindex(node)
        send_drain_request(state, node)


def drained_late(state: State) -> None:
    """Not all workers came to the boundary in time; nobody is beyond those that did.

    Where none did, any may be a step ahead: nobody gives way then, and it is tried later.
    """
    assert state.incident is not None
    if not any(node.drained for node in state.members()):
        state.incident.planned, state.resized_s = False, state.now_s
