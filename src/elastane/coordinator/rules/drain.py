"""A drain: before a planned change, all workers checkpoint at one and the same call.

The coordinator first gates the workers and asks each node for its furthest call of
should_checkpoint(). It then sets the target one call later, which no worker has passed. A node that
comes back is asked again. `machine` decides when the drain ends. A drain that passes its timeout
ends like one whose workers have checkpointed if a node is to leave. One that only adds workers to
the world is called off, and all workers continue: the script may evaluate before it reaches the
next boundary. The next such drain has twice the time, and so has the next one by which surplus
nodes leave if they have stayed: messages to one of them may take longer than the usual time.
"""

from __future__ import annotations

import math

from elastane.coordinator.rules import growth, next_world, recovery
from elastane.coordinator.rules.changes import PlannedGrowth
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import KnownNode, named
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import CallOff, Drain, DrainTarget
from elastane.protocol.model import Joining

# The longest time to reach the boundary of a drain that is called off otherwise. It is longer than
# most evaluations; a worker that hangs meanwhile is noticed after it.
DRAIN_MAX_S = 1800.0


def begin_drain(
    state: State, reason: str, growth: PlannedGrowth | None = None, *, admits: bool = False
) -> bool:
    """Begin a drain of the current world; always True, so that a rule can return it.

    With `growth`, all workers restart at its end. `admits`: it only lets workers join at a
    boundary.
    """
    state.drain.begin(growth, admits=admits)
    _request(state, reason)
    return True


def resume_drain(state: State) -> None:
    """Continue the drain in which the last coordinator left the workers, if there is one.

    Where some workers are no longer in the last drain, it was called off. Those that do not know
    it yet are informed, and also those of an older drain.
    """
    members = state.roster.members()
    number = max((node.drain.last_number for node in members), default=0)
    draining = [node for node in members if node.drain.was_draining]
    if draining and all(n.drain.was_draining for n in members if n.drain.last_number == number):
        state.drain.resume(number, admits=next_world.joining(state) is Joining.PLANNED)
        _request(state, "continuing the drain that the last coordinator began")
        return
    for node in draining:
        send_call_off(state, node, node.drain.last_number)


def _request(state: State, reason: str) -> None:
    state.incidents.open(Incident(at_s=state.now_s, reason=reason, planned=True))
    state.enter(MembershipPhase.DRAINING, reason)
    state.log(EventKind.DRAIN_STARTED, reason)
    for node in state.roster.members():
        node.drain.restart()
        state.roster.reindex(node)
        send_drain_request(state, node)


def send_drain_request(state: State, node: KnownNode) -> None:
    """Send `node` the current drain, or its target; also if the node comes back meanwhile."""
    assert state.world is not None
    fence, drain = state.world.fence, state.drain
    if drain.target_sent and not node.drain.saved:
        target = DrainTarget(
            fence=fence, drain=drain.number, calls=drain.target, stops=drain.stops_all
        )
        state.queue.send(node, target)
    elif not node.drain.gated:
        request = Drain(
            fence=fence, drain=drain.number, timeout_s=limit_s(state), reason=state.stage.reason
        )
        state.queue.send(node, request)


def set_target(state: State) -> None:
    """Set one call at which all workers checkpoint, and which none of them has passed."""
    assert state.world is not None
    nodes = state.roster.members()
    furthest = max((node.drain.calls or 0 for node in nodes), default=0)
    stops_all = all_save(state)
    if _has_sigterm_only(state, stops_all=stops_all):
        furthest = 0
    state.drain.aim(furthest, stops_all=stops_all)
    for node in nodes:
        send_drain_request(state, node)


def _has_sigterm_only(state: State, *, stops_all: bool) -> bool:
    """Whether the workers can save only on SIGTERM: those of an unmodified script that is stopped.

    Before all workers recover in place they are aimed at a step, as a new coordinator of the same
    drain would do, and workers follow the first aim alone.
    """
    ends = stops_all and state.drain.growth is None and state.in_place.active
    return ends and next_world.joining(state) is not Joining.ANYTIME


def all_workers_end(state: State) -> bool:
    """Whether no worker keeps its process after the drain, so that all have to checkpoint."""
    survive = state.in_place.active and recovery.has_survivors(state)
    return state.drain.growth is not None or not survive


def all_save(state: State) -> bool:
    """Whether all workers checkpoint at the target: those that stay may never step again.

    If too few stay, they wait for others with their state in memory. A scheduler that ends the job
    stops its nodes one after the other, and the last ones would end without a checkpoint.
    """
    if all_workers_end(state):
        return True
    if not state.roster.leaving or next_world.joining(state) is not Joining.ANYTIME:
        return False
    return not next_world.are_enough(state, next_world.next_world(state))


def stop_at_target(state: State) -> None:
    """Ask all workers to checkpoint where they wait, since more nodes leave as well."""
    state.drain.stop_all()
    for node in state.roster.members():
        node.drain.save_again()
        state.roster.reindex(node)
        send_drain_request(state, node)


def lacks_boundary(state: State) -> bool:
    """Whether no worker has reached any boundary, where others join and leave at boundaries."""
    if next_world.joining(state) is not Joining.PLANNED or all_workers_end(state):
        return False
    return not any(node.drain.calls for node in state.roster.members())


def limit_s(state: State) -> float:
    """Return how long the workers may take to reach the boundary of the current drain.

    A node that leaves does not wait for longer than in other drains.
    """
    usual_s, drain = state.spec.timing.drain_timeout_s, state.drain
    if state.roster.leaving:
        return usual_s
    in_vain = state.owner.missed
    if drain.is_optional:
        in_vain = (state.joining_tries if drain.admits else state.growth).called_off
    return max(usual_s, min(growth.doubled(usual_s, in_vain), DRAIN_MAX_S))


def ends_s(state: State) -> float:
    """Return when the current drain is over, whether or not all workers are at the boundary.

    A node whose deadline is near takes no more time of the others than it has itself.
    """
    leaving = (state.roster.nodes[i].leaves_by_s for i in state.roster.leaving)
    return min(state.stage.began_s + limit_s(state), *leaving, math.inf)


def call_off(state: State) -> bool:
    """Let the workers continue, since some did not reach the boundary; always True, as a rule."""
    waited_s = limit_s(state)
    if state.drain.admits:
        # The next such drain begins after the time that it may take itself.
        state.joining_tries.note_called_off()
        state.joining_tries.pause(state.now_s + limit_s(state))
        later = "others join at a later boundary"
    else:
        state.growth.note_called_off()
        later = "restart at a later checkpoint"
    reason = (
        f"workers of {named(state.roster.unsaved)} reached no step boundary within {waited_s:g} s:"
        f" all workers continue, and {later}"
    )
    state.incidents.drop()
    state.enter(MembershipPhase.RUNNING, reason)
    state.log(EventKind.DRAIN_ENDED, reason, called_off=True)
    for node in state.roster.members():
        node.drain.restart()
        state.roster.reindex(node)
        send_call_off(state, node, state.drain.number)
    return True


def send_call_off(state: State, node: KnownNode, number: int) -> None:
    """Inform `node` that this drain of the current world is called off."""
    assert state.world is not None
    state.queue.send(node, CallOff(fence=state.world.fence, drain=number))


def drained_late(state: State) -> None:
    """Record that the drain timed out with some workers not at the boundary.

    If any node is there, no worker is beyond it. If none is, any worker may be a step ahead: then
    no node leaves the world now, and the change is tried again later. Neither can workers join that
    need all survivors at a boundary.
    """
    assert state.incidents.current is not None
    joins_here = next_world.joining(state) is Joining.PLANNED
    if joins_here or not any(node.drain.saved for node in state.roster.members()):
        state.incidents.current.become_unplanned()
        state.owner.note_missed(state.now_s)
