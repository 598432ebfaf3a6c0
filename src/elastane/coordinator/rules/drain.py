"""A drain: before a planned change, all workers checkpoint at one and the same call.

The coordinator first gates the workers and asks each node for its furthest call of
should_checkpoint(). It then sets the target one call later, which no worker has passed. A node that
comes back is asked again. `machine` decides when the drain ends; a drain that passes its timeout
ends like one whose workers have checkpointed.
"""

from __future__ import annotations

from elastane.coordinator.rules import growth, next_world, recovery
from elastane.coordinator.rules.changes import PlannedGrowth
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import KnownNode
from elastane.coordinator.rules.state import Phase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drain, DrainTarget
from elastane.protocol.model import Joining


def begin_drain(state: State, reason: str, growth: PlannedGrowth | None = None) -> bool:
    """Begin a drain of the current world; always True, so that a rule can return it.

    With `growth`, all workers restart at its end.
    """
    state.incidents.open(Incident(at_s=state.now_s, reason=reason, planned=True))
    state.drain.begin(growth)
    state.enter(Phase.DRAINING, reason)
    state.log(EventKind.DRAIN_STARTED, reason)
    for node in state.roster.members():
        node.drain.restart()
        state.roster.reindex(node)
        send_drain_request(state, node)
    return True


def send_drain_request(state: State, node: KnownNode) -> None:
    """Send `node` what it has to know of the current drain, also when it comes back during it."""
    assert state.world is not None
    fence, timeout_s = state.world.fence, growth.drain_limit_s(state)
    if state.drain.target_sent and not node.drain.saved:
        state.queue.send(
            node, DrainTarget(fence=fence, calls=state.drain.target, stops=state.drain.stops_all)
        )
    elif not node.drain.gated:
        state.queue.send(node, Drain(fence=fence, timeout_s=timeout_s, reason=state.stage.reason))


def set_target(state: State) -> None:
    """Set one call at which all workers checkpoint, and which none of them has passed."""
    assert state.world is not None
    nodes = state.roster.members()
    furthest = max((node.drain.calls or 0 for node in nodes), default=0)
    stops_all = nobody_continues(state)
    if _has_sigterm_only(state, stops_all=stops_all):
        furthest = 0
    state.drain.aim(furthest, stops_all=stops_all)
    for node in nodes:
        send_drain_request(state, node)


def _has_sigterm_only(state: State, *, stops_all: bool) -> bool:
    """Whether workers can save nothing at a step, and may catch SIGTERM: of an unmodified script.

    Until all have joined they are aimed at a step: with all of them there, a new coordinator of the
    same drain would do so, and workers follow the first aim alone.
    """
    ends = stops_all and state.drain.growth is None and state.in_place.active
    return ends and next_world.joining(state) is Joining.NEVER


def nobody_continues(state: State) -> bool:
    """Whether no worker keeps its process after the drain, so that all have to checkpoint."""
    survive = state.in_place.active and recovery.has_survivors(state)
    return state.drain.growth is not None or not survive


def stop_at_target(state: State) -> None:
    """Ask all workers to checkpoint where they wait, since the last survivors leave as well."""
    state.drain.stop_all()
    for node in state.roster.members():
        node.drain.save_again()
        state.roster.reindex(node)
        send_drain_request(state, node)


def drained_late(state: State) -> None:
    """Record that the drain timed out with some workers not at the boundary.

    If any node is there, no worker is beyond it. If none is, any worker may be a step ahead: then
    no node leaves the world now, and the change is tried again later.
    """
    assert state.incidents.current is not None
    if not any(node.drain.saved for node in state.roster.members()):
        state.incidents.current.become_unplanned()
        state.owner.note_change(state.now_s)
