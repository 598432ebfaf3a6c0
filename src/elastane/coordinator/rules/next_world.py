"""The next world: which nodes and workers it consists of, and how it becomes the current one.

`next_world` answers for both kinds of recovery. After a restart all workers of the chosen nodes
start afresh. In a recovery in place the survivors come first, in the order of their ranks, then the
workers that join. `commit` is the one place that makes a world current; a broken invariant stops
it.
"""

from __future__ import annotations

from elastane.coordinator.rules import invariants, sizing, state_holders
from elastane.coordinator.rules.nodes import KnownNode
from elastane.coordinator.rules.ranks import (
    Candidate,
    WorldAssignment,
    assignments,
    choose,
    member_of,
    next_fence,
)
from elastane.coordinator.rules.sizing import NodeWorkers
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign
from elastane.protocol.model import Joining, World
from elastane.protocol.words import counted


def next_world(state: State) -> list[NodeWorkers]:
    """Return the nodes of the world that would follow now, in the order of their ranks."""
    return _afresh(state) if state.phase is MembershipPhase.FORMING else _in_place(state)


def _afresh(state: State) -> list[NodeWorkers]:
    """Return idle nodes, in whole replicas; all their workers will be new."""
    roster, span = state.roster, state.in_place.nodes_per_replica
    ids = roster.idle
    if state.gathering.follow_up and state.world is not None:
        # An arrival that is not ready is left out; a survivor never is.
        ids = ids - (roster.unready - {m.node_id for m in state.world.members})
    if len(ids) < sizing.fewest_nodes(state):
        ids = roster.idle
    found = [roster.nodes[node_id] for node_id in sorted(ids)]
    candidates = [Candidate(spec=node.spec, order=node.order) for node in found]
    most = min(sizing.most_nodes(state), len(ids) // span * span)
    specs = choose(state.world, candidates, most, state.spec.static)
    return [
        NodeWorkers(roster.nodes[spec.node_id], (), tuple(range(spec.local_world_size)))
        for spec in specs
    ]


def _in_place(state: State) -> list[NodeWorkers]:
    """Return the nodes with workers that can enter a world: survivors, then arrivals."""
    staying, coming = _able_nodes(state)
    most = sizing.most_nodes(state)
    incident = state.incidents.current
    if state.roster.is_stepping() and (incident is None or not incident.planned):
        # A surplus leaves at a boundary, where all are level. Displaced nodes are level among
        # themselves: one of them is enough.
        inside = sum(one.node.is_member for one in staying)
        most = max(most, min(inside + 1, len(staying)))
    # Nodes that reached the boundary stay first: the others may lack the last step
    # (`drained_late`).
    level = sorted(staying, key=lambda o: not (o.node.is_member and o.node.drain.saved))
    chosen = {one.node.id for one in sizing.choose_nodes(state, level, coming, most)}
    return [one for one in staying + coming if one.node.id in chosen]


def joining(state: State) -> Joining:
    """Return when new workers can join the current world: the least value of its members."""
    nodes = map(state.roster.nodes.__getitem__, state.roster.with_workers)
    return min((n.workers.joining for n in nodes if n.is_member), default=Joining.ANYTIME)


def takes_survivors_only(state: State) -> bool:
    """Whether no worker can join the next world.

    After a fault survivors may be at different steps, and not at a boundary.
    """
    when = joining(state)
    return when is Joining.NEVER or (when is Joining.PLANNED and not state.incidents.is_planned)


def _able_nodes(state: State) -> tuple[list[NodeWorkers], list[NodeWorkers]]:
    """Return the nodes with survivors in the order of their ranks, and the arrivals in theirs."""
    assert state.world is not None
    survivors_only, anytime = takes_survivors_only(state), joining(state) is Joining.ANYTIME
    needs_displaced = _needs_displaced(state) and anytime
    is_sharded = _is_sharded(state)
    staying, coming = list[NodeWorkers](), list[NodeWorkers]()
    for node in state.roster.nodes.values():
        able = node.workers.recoverable if node.is_current else set[int]()
        if node.session is None or node.leaving or node.is_left_out or not able:
            continue
        survivors = node.survivors if node.is_member else ()
        if needs_displaced and state.holders.is_displaced_holder(node):
            survivors = tuple(sorted(able))
        joins = not survivors_only and (anytime or not node.workers.left_place)
        arriving = tuple(sorted(able - set(survivors))) if joins else ()
        if not survivors and not arriving:
            continue
        one = NodeWorkers(node, survivors, arriving)
        if is_sharded and not survivors and len(one.joining) < node.spec.local_world_size:
            continue
        (staying if survivors else coming).append(one)
    order = {member.node_id: rank for rank, member in enumerate(state.world.members)}
    order = {**{i: len(order) + rank for i, rank in state.holders.displaced.items()}, **order}
    staying.sort(key=lambda one: order[one.node.id])
    coming.sort(key=lambda one: one.node.order)
    return staying, coming


def _needs_displaced(state: State) -> bool:
    """Whether the state may be held by displaced nodes alone."""
    members = state.roster.members()
    if state.incidents.is_planned:
        return not any(node.survivors for node in members)
    # The members left may have joined with this world, and made no step yet.
    return not any(state_holders.rules_out_older_worlds(node, state.world) for node in members)


def are_enough(state: State, found: list[NodeWorkers]) -> bool:
    """Whether these workers are enough for a world; without whole replicas it only levels them."""
    workers = sum(len(one.workers) for one in found)
    if not sizing.are_whole_replicas(state, found):
        return workers == sum(one.node.spec.local_world_size for one in found)
    return len(found) >= sizing.fewest_nodes(state) and workers >= workers_needed(state, found)


def workers_needed(state: State, found: list[NodeWorkers]) -> int:
    """Return the least number of workers of a world of these nodes.

    The default is the size of the smallest nodes that are enough. A job with no node to spare
    therefore needs all its workers, however they are spread over the nodes.
    """
    fewest = sizing.fewest_nodes(state)
    largest = max((node.spec.local_world_size for node in state.roster.nodes.values()), default=1)
    sizes = sorted(one.node.spec.local_world_size for one in found) + [largest] * fewest
    least = state.spec.min_workers or sum(sizes[:fewest])
    # With shards no worker is left out: it may be the only one a step ahead.
    whole = sum(one.node.spec.local_world_size for one in found) if _is_sharded(state) else 0
    return max(least, whole)


def _is_sharded(state: State) -> bool:
    """Whether workers hold shards: then a node enters a world with all of its workers.

    A joining worker has no mesh coordinate yet, and so reports no shards.
    """
    return any(node.workers.sharding is not None for node in state.roster.nodes.values())


def commit(state: State, found: list[NodeWorkers], why: str) -> None:
    """Make a world of these nodes durable, then send each of them its assignment.

    Members of the current world without a place in the next one become standbys.
    """
    displaced = set[str]()
    if state.phase is MembershipPhase.FORMING:
        specs = [one.node.spec for one in found]
        fence = next_fence(state.world, specs, state.worlds.highest_fence)
        world = World(fence=fence, members=tuple(member_of(spec) for spec in specs))
        state.in_place.begin(active=False)
        state.holders.start_afresh()
        state.incidents.start_afresh()
        state.budget.start_afresh()
        state.growth.start_all(state.now_s)
        state.joining_tries.end_pauses()
    else:
        assert state.world is not None, "only a world is recovered in place"
        displaced |= state.holders.displaced.keys()
        members = tuple(member_of(one.node.spec, one.workers) for one in found)
        world = World(fence=state.worlds.next_round, members=members)
        state.holders.displace(state.world, world, state.roster.nodes)
    _commit(state, world, displaced, why)


def _commit(state: State, world: World, displaced: set[str], why: str) -> None:
    """Commit a world; `displaced` nodes held the state that the current one began with."""
    fault = invariants.broken_succession(state.world, world)
    fault = fault or invariants.broken_size(
        state.spec, state.world, world, displaced, state.in_place.nodes_per_replica
    )
    assert not fault, fault
    members = [state.roster.nodes[member.node_id] for member in world.members]
    size = f"{counted(len(members), 'node')}, {counted(world.world_size, 'worker')}"
    reason = f"{size}: {why}"
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
    state.term.note_world()
    state.in_place.commit_world()
    state.incidents.commit_world(member.node_id for member in world.members)
    state.gathering.forget_arrivals()
    state.persist()
    for node, member, assignment in zip(members, world.members, given, strict=True):
        in_place = state.in_place.active
        node.enter_world(world.fence, member.local_ranks, state.now_s, in_place=in_place)
        state.roster.reindex(node)
        state.queue.send(node, Assign(assignment))
    state.in_place.note_partial(partial=sizing.has_partial_replicas(state))
    state.enter(MembershipPhase.RUNNING, reason)
    state.log(
        EventKind.ROUND_SETTLED,
        reason,
        nodes=len(members),
        world_size=world.world_size,
        idle=len(state.roster.idle),
        members=" ".join(m.node_id for m in world.members)[:1000],
    )


def is_loopback(host: str) -> bool:
    """Whether this address, or empty text, is of the coordinator's own machine."""
    return host in ("", "localhost", "::1") or host.startswith(("127.", "::ffff:127."))


def master_addr(state: State, first: KnownNode) -> str:
    """Return the address under which all members reach the node of rank 0.

    It is the user's --local-addr, otherwise the peer address of its connection. If that is a
    loopback address, the node is on the coordinator's machine. Then it is the address under which a
    node of another machine reached the coordinator, never a name that needs a resolver.
    """
    if first.spec.local_addr:
        return first.spec.local_addr
    if not is_loopback(first.connection.peer_host):
        return first.connection.peer_host
    for node in state.roster.nodes.values():
        local_host = node.connection.local_host
        if not is_loopback(node.connection.peer_host) and not is_loopback(local_host):
            return local_host
    return first.connection.peer_host or "127.0.0.1"
