"""How many nodes a world has, and which: the owner's range, in whole replicas.

A changed range counts from the next world on. A raised minimum stops no worker. After a lowered
maximum the nodes of the highest ranks leave the world at a step boundary and become spares. A
scheduler that lowers the maximum also stops nodes a moment later. The coordinator waits for that
moment, so that the survivors are interrupted once.

A replica may span several nodes, each with one slice of it. A survivor may be a step ahead, with
state that no other node holds. So survivors form a world even without whole replicas: it brings
them to one step and trains none. Then surplus nodes leave it and become spares. A spare keeps its
slice; if the slice is of no use and another would be, its workers start afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastane.coordinator.rules.nodes import KnownNode, named
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import NO_SLICE, whole_replicas, world_bounds


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
    """Apply the requested range of nodes and make it durable."""
    wanted = state.owner.pop_range()
    if wanted is None or state.spec.static or state.ending.outcome is not None:
        return
    before = (state.spec.min_nodes, state.spec.max_nodes)
    if wanted == before and state.owner.resized:
        return
    state.owner.note_resized()
    if wanted != before:
        minimum, maximum = wanted
        state.resize(minimum, maximum)
        state.owner.note_change(state.now_s)
        reason = f"{minimum} to {maximum} nodes, in place of {before[0]} to {before[1]}"
        state.log(EventKind.RESIZED, reason, min_nodes=minimum, max_nodes=maximum)
    state.persist()


def reason_to_shrink(state: State) -> str:
    """Return why nodes are to leave the world now; empty: none are, or not yet."""
    assert state.world is not None
    gone = sorted(
        i
        for i in state.roster.leaving & state.roster.with_workers
        if state.roster.nodes[i].is_member
    )
    if gone:
        return f"{named(gone)} to leave ({named({state.roster.nodes[i].leaving for i in gone})})"
    surplus = [m.node_id for m in state.world.members[most_nodes(state) :]]
    if not surplus:
        return ""
    due_s = state.owner.resized_s + state.spec.timing.gather_max_s
    if state.now_s < due_s:
        state.queue.wait_until(due_s)
        return ""
    limit = f"at most {state.spec.max_nodes} nodes"
    if state.in_place.nodes_per_replica > 1:
        limit += f", in whole replicas of {state.in_place.nodes_per_replica}"
    return f"{limit}: {named(surplus)} leave the world"


def fewest_nodes(state: State) -> int:
    """Return the least number of nodes of a world, in whole replicas."""
    return world_bounds(
        state.spec.min_nodes, state.spec.max_nodes, state.in_place.nodes_per_replica
    )[0]


def most_nodes(state: State) -> int:
    """Return the greatest number of nodes of a world, in whole replicas."""
    return world_bounds(
        state.spec.min_nodes, state.spec.max_nodes, state.in_place.nodes_per_replica
    )[1]


def record_sharding(state: State, node: KnownNode) -> None:
    """Record the number of nodes per replica."""
    # While all workers start afresh, a late report is about the mesh before.
    if node.workers.sharding is not None and state.phase is not MembershipPhase.FORMING:
        state.in_place.note_span(node.workers.sharding.span)


def reset_nodes_per_replica(state: State) -> None:
    """Forget the number of nodes per replica if one replica was the whole world.

    The mesh may have been sized by that world. Otherwise the next world has whole replicas at once.
    """
    if state.world is None or len(state.world.members) == state.in_place.nodes_per_replica:
        state.in_place.reset_span()


def replica_fits(state: State) -> bool:
    """Whether the job's range allows one whole replica, or may yet, since its owner changes it."""
    return state.in_place.nodes_per_replica <= state.spec.max_nodes or state.owner.resized


def hold_whole_state(state: State, nodes: Sequence[KnownNode]) -> bool:
    """Whether these nodes together hold all slices; a node that reported none may hold any."""
    span = state.in_place.nodes_per_replica
    if span == 1 or any(_slice_of(node) == NO_SLICE for node in nodes):
        return True
    held = {
        (_slice_of(node), i) for node in nodes for i in node.survivors or node.workers.recoverable
    }
    size = max(node.spec.local_world_size for node in nodes)
    return len(held) >= span * size


def choose_nodes(
    state: State, staying: list[NodeWorkers], coming: list[NodeWorkers], most: int
) -> list[NodeWorkers]:
    """Return the nodes of the next world: whole replicas, or all survivors if they are not level.

    All survivors are chosen only if enough nodes are there for a world once all of them are level.
    Otherwise only whole replicas are, and the rest wait with their state.
    """
    found = staying + coming
    if state.in_place.nodes_per_replica == 1:
        return found[:most]
    whole = _whole_replicas(state, found)
    holders = [one for one in staying if _slice_of(one.node) != NO_SLICE]
    ids = {one.node.id for one in whole}
    if _is_level(state) or all(one.node.id in ids for one in holders):
        return whole
    could = len(found) // state.in_place.nodes_per_replica * state.in_place.nodes_per_replica
    return holders if could >= fewest_nodes(state) else whole


def are_whole_replicas(state: State, found: Sequence[NodeWorkers]) -> bool:
    """Whether these nodes make whole replicas; otherwise their world only levels them."""
    return state.in_place.nodes_per_replica == 1 or len(_whole_replicas(state, found)) == len(found)


def _whole_replicas(state: State, found: Sequence[NodeWorkers]) -> list[NodeWorkers]:
    parts = [_slice_of(one.node) for one in found]
    return [
        found[i] for i in whole_replicas(parts, state.in_place.nodes_per_replica, most_nodes(state))
    ]


def _is_level(state: State) -> bool:
    """Whether all members of the current world are at the same step."""
    return state.incidents.is_planned


def has_partial_replicas(state: State) -> bool:
    """Whether the current world has a partial replica: then it makes no steps."""
    if state.in_place.nodes_per_replica == 1:
        return False
    members = state.roster.members()
    if any(_slice_of(node) == NO_SLICE for node in members):
        return False
    inside = whole_replicas(
        [_slice_of(node) for node in members], state.in_place.nodes_per_replica, len(members)
    )
    return len(inside) < len(members)


def reports_level(state: State, node: KnownNode) -> bool:
    """Whether this member reports that its world makes no steps, and all of it are at one step."""
    fence = state.world.fence if state.world is not None else None
    level = node.workers.sharding.level if node.workers.sharding is not None else None
    return level is not None and level == fence and node.is_member


def hold_no_slices(state: State) -> bool:
    """Whether a member reports that all members are at one step, and no node holds a slice yet."""
    nodes = state.roster.nodes.values()
    return all(_slice_of(node) == NO_SLICE for node in nodes) and any(
        reports_level(state, node) for node in nodes
    )


def nodes_to_start_afresh(state: State) -> list[KnownNode]:
    """Return nodes whose slices prevent a whole replica that fresh workers would complete.

    They are nodes without a place. If the next world lacks nodes and its members are level, members
    are considered too.
    """
    if state.in_place.nodes_per_replica == 1:
        return []
    waits = state.phase is MembershipPhase.REGROUPING and _is_level(state)
    inside = [node for node in state.roster.members() if node.survivors and not node.leaving]
    outside = [
        state.roster.nodes[i]
        for i in sorted(state.roster.with_standbys)
        if i not in state.holders.displaced
    ]
    outside = [node for node in outside if not (node.is_member or node.workers.stopping)]
    spares = [node for node in outside if _slice_of(node) != NO_SLICE]
    first = 0 if waits else len(inside)
    held = [_slice_of(node) for node in inside + spares]
    held += [NO_SLICE] * (len(outside) - len(spares))
    span, most, found = state.in_place.nodes_per_replica, most_nodes(state), list[KnownNode]()
    now = whole_replicas(held, span, most)
    could = whole_replicas(held[:first] + [NO_SLICE] * (len(held) - first), span, most)
    for i, node in reversed([*enumerate(inside + spares)][first:]):
        if now and i not in now and len(whole_replicas(held, span, most)) < len(could):
            held[i] = NO_SLICE
            found.append(node)
    return found


def _slice_of(node: KnownNode) -> int:
    return node.workers.sharding.part if node.workers.sharding is not None else NO_SLICE
