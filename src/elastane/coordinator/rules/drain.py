"""A drain: before a planned change, all workers checkpoint at one and the same call.

The coordinator first gates the workers and asks each node for its furthest call of
should_checkpoint(). It then sets the target one call later, which no worker has passed. A node that
comes back is asked again. `machine` decides when the drain ends; a drain that passes its timeout
ends like one whose workers have checkpointed.
"""

from __future__ import annotations

from elastane.coordinator.rules import recovery
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.state import KnownNode, Phase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drain, DrainTarget


def begin_drain(state: State, reason: str) -> bool:
    """Begin a drain of the current world; always True, so that a rule can return it."""
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
    """Send `node` what it has to know of the current drain, also when it comes back during it."""
    assert state.world is not None
    fence, timeout_s = state.world.fence, state.spec.timing.drain_timeout_s
    if state.drain_target_sent and not node.drained:
        state.send(
            node, DrainTarget(fence=fence, calls=state.drain_target, stops=state.drain_stops_all)
        )
    elif not node.marked:
        state.send(node, Drain(fence=fence, timeout_s=timeout_s, reason=state.phase_reason))


def set_target(state: State) -> None:
    """Set one call at which all workers checkpoint, and which none of them has passed."""
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
    """Whether no worker keeps its process after the drain, so that all have to checkpoint."""
    return not (state.in_place and recovery.has_survivors(state))


def stop_at_target(state: State) -> None:
    """Ask all workers to checkpoint where they wait, since the last survivors leave as well."""
    state.drain_stops_all = True
    for node in state.members():
        node.drained = False
        state.reindex(node)
        send_drain_request(state, node)


def drained_late(state: State) -> None:
    """Record that the drain timed out with some workers not at the boundary.

    If any node is there, no worker is beyond it. If none is, any worker may be a step ahead: then
    no node leaves the world now, and the change is tried again later.
    """
    assert state.incident is not None
    if not any(node.drained for node in state.members()):
        state.incident.planned, state.resized_s = False, state.now_s
