"""Gathering nodes, and committing a world.

torchrun waits out a last call of 30 s whenever min <= nodes < max. Here it ends 3 s after the
latest arrival. A world that follows another has no last call: all nodes that could be in it are
known. `commit_world` is the one place that makes a world current; a broken invariant stops it.
"""

from __future__ import annotations

from collections.abc import Collection

from elastane.coordinator.rules import ending, invariants, sizing
from elastane.coordinator.rules.nodes import KnownNode, Place, named
from elastane.coordinator.rules.ranks import (
    Candidate,
    WorldAssignment,
    assignments,
    choose,
    next_fence,
    world_of,
)
from elastane.coordinator.rules.state import Phase, State
from elastane.protocol.limits import FENCE_WAIT_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign
from elastane.protocol.model import World

# More nodes than this are not named while the job waits for others.
_CROWD = 64


def begin_gathering(state: State, reason: str, *, follow_up: bool, delay_s: float = 0.0) -> None:
    """Begin to gather the next world; `follow_up`: it consists of the nodes of the last one."""
    state.enter(Phase.FORMING, reason)
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
    ):  # avoids counting a crowd at each arrival
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
        state.enter(Phase.RECOVERING, f"{named(holders)} still has its workers")
        return True
    fenced_s = (
        state.stage.began_s + FENCE_WAIT_S
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
        return commit_gathered(state, state.stage.reason)
    if len(state.roster.idle) >= sizing.most_nodes(state):
        return commit_gathered(state, "all nodes are here")
    timing = state.spec.timing
    due_s = state.gathering.last_call_ends_s(state.now_s, timing)
    if state.now_s >= due_s:
        return commit_gathered(state, "the last call has ended")
    state.stage.explain(
        f"{len(state.roster.idle)} of {state.spec.min_nodes} to {state.spec.max_nodes} nodes are"
        f" here; the last call ends {timing.last_call_s:g} s after the latest arrival"
    )
    state.queue.wait_until(due_s)
    return False


def _explain_wait(state: State) -> None:
    reason = (
        "no node of the last world can be reached; it may still train where this"
        " coordinator cannot see it, and stops itself before this wait ends"
    )
    if state.stage.explain(reason):
        state.log(EventKind.WAITING, reason)


def _wait_for_nodes(state: State, from_s: float) -> bool:
    needed, here = sizing.fewest_nodes(state), len(state.roster.idle)
    limit_s = state.spec.timing.join_timeout_s
    if not sizing.replica_fits(state):
        return ending.no_replica(state)
    if state.now_s >= from_s + limit_s:
        return ending.too_few(state, here, needed)
    # The names of a crowd help no reader, and each arrival would sort them.
    names = f" ({named(state.roster.idle) or 'none'})" if here <= _CROWD else ""
    reason = (
        f"{here} of at least {needed} nodes are here{names}; the job waits for"
        f" {needed - here} more, {limit_s:g} s at most"
    )
    if state.roster.nodes and state.stage.explain(reason):  # without nodes there is no reader
        state.log(EventKind.WAITING, reason, nodes=here, min_nodes=needed)
    state.queue.wait_until(from_s + limit_s)
    return False


def commit_gathered(state: State, why: str) -> bool:
    """Commit a world of the gathered nodes, in which all workers start afresh."""
    ids = state.roster.idle
    if state.gathering.follow_up and state.world is not None:
        # An arrival that is not ready is left out; a survivor never is.
        ids = ids - (state.roster.unready - {m.node_id for m in state.world.members})
    if len(ids) < sizing.fewest_nodes(state):
        ids = state.roster.idle
    candidates = [
        Candidate(spec=state.roster.nodes[i].spec, order=state.roster.nodes[i].order)
        for i in sorted(ids)
    ]
    most = min(
        sizing.most_nodes(state),
        len(ids) // state.in_place.nodes_per_replica * state.in_place.nodes_per_replica,
    )
    specs = choose(state.world, candidates, most, state.spec.static)
    world = world_of(next_fence(state.world, specs, state.worlds.highest_fence), specs)
    state.in_place.begin(active=False)
    state.holders.start_afresh()
    commit_world(state, world, why)
    return True


def commit_world(
    state: State, world: World, why: str, holders: Collection[str] = frozenset()
) -> None:
    """Make the next world durable, then send each member its assignment.

    `holders` have no place in the current world and hold the state that it began with.
    """
    fault = invariants.broken_succession(state.world, world)
    fault = fault or invariants.broken_size(
        state.spec, state.world, world, holders, state.in_place.nodes_per_replica
    )
    assert not fault, fault
    members = [state.roster.nodes[member.node_id] for member in world.members]
    reason = f"{len(members)} nodes, {world.world_size} workers: {why}"
    place = WorldAssignment(
        master_addr=master_addr(state, members[0]),
        offer=members[0].offer,
        restarts_used=state.budget.used,
        max_restarts=state.budget.allowed,
        reason=reason,
        in_place=state.in_place.active,
    )
    given = assignments(world, place)
    fault = invariants.broken_ranks(world, given)
    assert not fault, fault
    for node in state.roster.members():
        node.become_standby()  # Unless it is a member of the next world too.
        state.roster.reindex(node)
    state.worlds.commit(world, state.now_s)
    state.in_place.commit_world()
    state.incidents.commit_world()
    state.gathering.forget_arrivals()
    state.persist()
    for node, member, assignment in zip(members, world.members, given, strict=True):
        in_place = state.in_place.active
        node.enter_world(world.fence, member.local_ranks, state.now_s, in_place=in_place)
        state.roster.reindex(node)
        state.queue.send(node, Assign(assignment))
    state.in_place.note_partial(partial=sizing.has_partial_replicas(state))
    state.enter(Phase.RUNNING, reason)
    state.log(
        EventKind.ROUND_SETTLED,
        reason,
        nodes=len(members),
        world_size=world.world_size,
        spares=len(state.roster.idle),
        members=" ".join(m.node_id for m in world.members)[:1000],
    )


def _is_loopback(host: str) -> bool:
    return host in ("", "localhost", "::1") or host.startswith(("127.", "::ffff:127."))


def master_addr(state: State, first: KnownNode) -> str:
    """Return the address under which all members reach the node of rank 0.

    It is the user's --local-addr, otherwise the peer address of its connection. If that is a
    loopback address, the node is on the coordinator's machine. Then it is the address under which a
    node of another machine reached the coordinator, never a name that needs a resolver.
    """
    if first.spec.local_addr:
        return first.spec.local_addr
    if not _is_loopback(first.connection.peer_host):
        return first.connection.peer_host
    for node in state.roster.nodes.values():
        if not _is_loopback(node.connection.peer_host) and not _is_loopback(
            node.connection.local_host
        ):
            return node.connection.local_host
    return first.connection.peer_host or "127.0.0.1"
