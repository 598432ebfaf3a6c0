"""Nodes that hold parts of replicas, where one replica is of several nodes: who makes whole ones.

Any of the survivors may be a step ahead, and nobody else then has what it holds. So a world of
them is settled also where they are no whole replicas: there they come to one step, and make none.
Then those who are too many give way, and wait as spares do. A spare keeps its part; where it is of
no use, and anything else would be, its workers begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from elastane.coordinator.rules.state import KnownNode, Phase, State, named
from elastane.protocol.log_events import EventKind
from elastane.protocol.sharding import NO_PART, bounds, replicas


@dataclass(frozen=True, slots=True)
class NodeWorkers:
    """The workers of one node that could be in the next world, survivors first."""

    node: KnownNode
    survivors: tuple[int, ...]
    joining: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Their local ranks, in the order of their ranks."""
        return self.survivors + self.joining


def apply_range(state: State) -> None:
    """Put the range in force that was asked for."""
    wanted, state.requested_range = state.requested_range, None
    if wanted is None or state.spec.static or state.outcome is not None:
        return
    before = (state.spec.min_nodes, state.spec.max_nodes)
    if wanted == before and state.resized:
        return
    state.resized = True
    if wanted != before:
        minimum, maximum = wanted
        state.spec = msgspec.structs.replace(state.spec, min_nodes=minimum, max_nodes=maximum)
        state.resized_s = state.now_s
        reason = f"{minimum} to {maximum} nodes, in place of {before[0]} to {before[1]}"
        state.log(EventKind.RESIZED, reason, min_nodes=minimum, max_nodes=maximum)
    state.persist()


def reason_to_shrink(state: State) -> str:
    """Return why nodes are to give their places up now; empty: none, or not yet."""
    assert state.world is not None
    gone = sorted(i for i in state.leaving & state.with_workers if state.is_member(state.nodes[i]))
    if gone:
        return f"{named(gone)} to leave ({named({state.nodes[i].leaving for i in gone})})"
    surplus = [m.node_id for m in state.world.members[most_nodes(state) :]]
    if not surplus:
        return ""
    due_s = state.resized_s + state.spec.timing.gather_max_s
    if state.now_s < due_s:
        state.wait_until(due_s)
        return ""
    limit = f"at most {state.spec.max_nodes} nodes"
    if state.nodes_per_replica > 1:
        limit += f", in whole replicas of {state.nodes_per_replica}"
    return f"{limit}: {named(surplus)} give way"


def fewest_nodes(state: State) -> int:
    """Return of how many nodes a world is at least, in whole replicas."""
    return bounds(state.spec.min_nodes, state.spec.max_nodes, state.nodes_per_replica)[0]


def most_nodes(state: State) -> int:
    """Return of how many nodes a world is at most, in whole replicas."""
    return bounds(state.spec.min_nodes, state.spec.max_nodes, state.nodes_per_replica)[1]


def record_sharding(state: State, node: KnownNode) -> None:
    """Take note of how many nodes a replica is."""
    # While all begin anew, what comes late is said of the mesh before.
    if node.sharding is not None and state.phase is not Phase.FORMING:
        state.nodes_per_replica = max(state.nodes_per_replica, node.sharding.span)


def reset_nodes_per_replica(state: State) -> None:
    """Forget how many nodes a replica is, where it was all of a world: it may have been for that.

    Else the next world is of whole replicas from its begin.
    """
    if state.world is None or len(state.world.members) == state.nodes_per_replica:
        state.nodes_per_replica = 1


def replica_fits(state: State) -> bool:
    """Whether the job may have the nodes of one replica; the range is its owner's to change."""
    return state.nodes_per_replica <= state.spec.max_nodes or state.resized


def hold_whole_state(state: State, nodes: Sequence[KnownNode]) -> bool:
    """Whether these hold, together, all parts of the state; who said nothing yet may hold any."""
    span = state.nodes_per_replica
    if span == 1 or any(_slice_of(node) == NO_PART for node in nodes):
        return True
    held = {(_slice_of(node), i) for node in nodes for i in node.survivors or node.recoverable}
    size = max(node.spec.local_world_size for node in nodes)
    return len(held) >= span * size


def choose_nodes(
    state: State, staying: list[NodeWorkers], coming: list[NodeWorkers], most: int
) -> list[NodeWorkers]:
    """Return who is to be in the next world; survivors that are no whole replicas all are.

    Where these, begun anew, could be as many as it takes; else all wait with what they hold.
    """
    found = staying + coming
    if state.nodes_per_replica == 1:
        return found[:most]
    whole = _whole_replicas(state, found)
    holders = [one for one in staying if _slice_of(one.node) != NO_PART]
    ids = {one.node.id for one in whole}
    if _is_level(state) or all(one.node.id in ids for one in holders):
        return whole
    could = len(found) // state.nodes_per_replica * state.nodes_per_replica
    return holders if could >= fewest_nodes(state) else whole


def are_whole_replicas(state: State, found: Sequence[NodeWorkers]) -> bool:
    """Whether these make whole replicas; else they are to come to one step, however few."""
    return state.nodes_per_replica == 1 or len(_whole_replicas(state, found)) == len(found)


def _whole_replicas(state: State, found: Sequence[NodeWorkers]) -> list[NodeWorkers]:
    parts = [_slice_of(one.node) for one in found]
    return [found[i] for i in replicas(parts, state.nodes_per_replica, most_nodes(state))]


def _is_level(state: State) -> bool:
    """Whether all members of the world in force are at one step: nobody is ahead of the others."""
    return state.incident is None or state.incident.planned


def has_partial_replicas(state: State) -> bool:
    """Whether members of the world in force make no whole replica: it makes no steps."""
    if state.nodes_per_replica == 1:
        return False
    members = state.members()
    if any(_slice_of(node) == NO_PART for node in members):
        return False
    inside = replicas([_slice_of(node) for node in members], state.nodes_per_replica, len(members))
    return len(inside) < len(members)


def reports_level(state: State, node: KnownNode) -> bool:
    """Whether this member says of the world in force that it makes no steps, and all are level."""
    fence = state.world.fence if state.world is not None else None
    level = node.sharding.level if node.sharding is not None else None
    return level is not None and level == fence and state.is_member(node)


def nodes_to_start_afresh(state: State) -> list[KnownNode]:
    """Return whose parts are in the way: begun anew, they make more whole replicas.

    Of those without a place; and of all, where the next world lacks nodes and they are level.
    """
    if state.nodes_per_replica == 1:
        return []
    waits = state.phase is Phase.REGROUPING and _is_level(state)
    inside = [node for node in state.members() if node.survivors and not node.leaving]
    beside = [state.nodes[i] for i in sorted(state.with_standbys) if i not in state.displaced]
    beside = [node for node in beside if not (state.is_member(node) or node.stopping)]
    spares = [node for node in beside if _slice_of(node) != NO_PART]
    first = 0 if waits else len(inside)
    held = [_slice_of(node) for node in inside + spares]
    held += [NO_PART] * (len(beside) - len(spares))
    span, most, found = state.nodes_per_replica, most_nodes(state), list[KnownNode]()
    now = replicas(held, span, most)
    could = replicas(held[:first] + [NO_PART] * (len(held) - first), span, most)
    for i, node in reversed([*enumerate(inside + spares)][first:]):
        if now and i not in now and len(replicas(held, span, most)) < len(could):
            held[i] = NO_PART
            found.append(node)
    return found


def _slice_of(node: KnownNode) -> int:
    return node.sharding.part if node.sharding is not None else NO_PART
