"""Gathering nodes for a world in which all workers start afresh.

torchrun waits out a last call of 30 s whenever min <= nodes < max. Here it ends 3 s after the
latest arrival. A world that follows another has no last call: all nodes that could be in it are
known.
"""

from __future__ import annotations

from elastane.coordinator.rules import ending, next_world, sizing
from elastane.coordinator.rules.nodes import Place, named
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.log_events import EventKind

# More nodes than this are not named while the job waits for others.
_CROWD = 64


def begin_gathering(state: State, reason: str, *, follow_up: bool, delay_s: float = 0.0) -> None:
    """Begin to gather the next world; `follow_up`: it consists of the nodes of the last one."""
    state.enter(MembershipPhase.FORMING, reason)
    sizing.reset_nodes_per_replica(state)
    for node in state.roster.holders_of_workers():
        if node.place is Place.STANDBY and node.fence is not None:
            state.stop(node, node.fence, reason)
    state.gathering.begin(state.now_s + delay_s, follow_up=follow_up)
    if delay_s:
        state.log(EventKind.WAITING, f"{delay_s:g} s before the next attempt: {reason}")


def arrivals_due(state: State) -> list[str]:
    """Return the nodes that join the running world now; empty: there are none, or not yet."""
    assert state.world is not None
    room = sizing.most_nodes(state) - len(state.world.members)
    if (
        room <= 0
        or len(state.roster.idle) - len(state.roster.idle & state.roster.unready)
        < state.in_place.nodes_per_replica
    ):
        # Nodes whose workers cannot start quickly yet are not gathered.
        state.gathering.forget_arrivals()
        return []
    due_s = state.gathering.ends_s(state.now_s, state.spec.timing)
    if (
        len(state.roster.idle) >= room or state.now_s >= due_s
    ):  # avoids counting all waiting nodes at each arrival
        waiting = sorted(state.roster.idle - state.roster.unready)
        if len(waiting) >= room or state.now_s >= due_s:
            return waiting[
                : min(
                    room,
                    len(waiting)
                    // state.in_place.nodes_per_replica
                    * state.in_place.nodes_per_replica,
                )
            ]
    state.queue.wait_until(due_s)
    return []


def commit_when_due(state: State) -> bool:
    """Commit the next world when it is due, or end the job if too few nodes came in time."""
    if state.roster.unreachable:
        return False  # The reconnect grace is short, and ends by itself.
    holders = [i for i in state.roster.with_workers if state.roster.nodes[i].is_member]
    if holders:
        state.enter(MembershipPhase.RECOVERING, f"{named(holders)} still has its workers")
        return True
    fenced_s = (
        state.stage.began_s + state.spec.timing.fence_wait_s
        if state.term.store_backed and state.worlds.intact
        else 0.0
    )
    fenced_s = max(fenced_s, state.holders.wait_until_s(state.roster.members(), state.world))
    due_s = max(state.gathering.not_before_s, fenced_s)
    if state.now_s < due_s:
        if state.now_s < fenced_s:
            _explain_wait(state)
        state.queue.wait_until(due_s)
        return False
    if len(state.roster.idle) < sizing.fewest_nodes(state) or not sizing.replica_fits(state):
        state.gathering.open_to_all()
        return _wait_for_nodes(state, max(state.stage.began_s, fenced_s))
    if state.gathering.follow_up:
        return _commit(state, state.stage.reason)
    if len(state.roster.idle) >= sizing.most_nodes(state):
        return _commit(state, "all nodes are here")
    timing = state.spec.timing
    due_s = state.gathering.last_call_ends_s(state.now_s, timing)
    if state.now_s >= due_s:
        return _commit(state, "the last call has ended")
    state.stage.explain(
        f"{len(state.roster.idle)} of {state.spec.min_nodes} to {state.spec.max_nodes} nodes are"
        f" here; the last call ends {timing.last_call_s:g} s after the latest arrival"
    )
    state.queue.wait_until(due_s)
    return False


def _commit(state: State, why: str) -> bool:
    next_world.commit(state, next_world.next_world(state), why)
    return True


def _explain_wait(state: State) -> None:
    reason = (
        "no node of the last world can be reached; it may still train where this coordinator"
        f" cannot see it, and stops itself before this wait of {state.spec.timing.fence_wait_s:g} s"
        " ends (--rdzv-conf isolation_limit sets it)"
    )
    if state.stage.explain(reason):
        state.log(EventKind.WAITING, reason)


def _wait_for_nodes(state: State, from_s: float) -> bool:
    needed, here = sizing.fewest_nodes(state), len(state.roster.idle)
    limit_s = state.join_left_s
    if not sizing.replica_fits(state):
        return ending.no_replica(state)
    if state.now_s >= from_s + limit_s:
        what, next_step = f"{here} of at least {needed} nodes joined", ending.MISSING_NODES
        return ending.too_few(state, what, state.roster.idle, state.join_limit_s, next_step)
    # A long list of names helps no reader, and each arrival would sort it.
    names = f" ({named(state.roster.idle) or 'none'})" if here <= _CROWD else ""
    reason = (
        f"{here} of at least {needed} nodes are here{names}; the job waits for"
        f" {needed - here} more, {round(limit_s, 1):g} s at most"
    )
    if state.roster.nodes and state.stage.explain(reason):  # without nodes there is no reader
        state.log(EventKind.WAITING, reason, nodes=here, min_nodes=needed)
    state.queue.wait_until(from_s + limit_s)
    return False
