"""Worlds whose workers recover in place: survivors keep their processes, and get another world.

Owns who has a place in the next one, and what becomes of nodes and workers that have none yet;
who follows the lost, and who pays for that, is `successors`'. A world follows at once where enough
workers are left; the others get ready beside it, and are taken in at a step's boundary. Where no
survivor is left, all workers start anew (`phases`).
"""

from __future__ import annotations

import msgspec

from elastane.coordinator.rules import ending, forming, liveness, sizing, state_holders
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.ranks import member_of
from elastane.coordinator.rules.sizing import NodeWorkers
from elastane.coordinator.rules.state import KnownNode, Phase, State
from elastane.protocol.hangs import places_of
from elastane.protocol.limits import HANG_STALL_S, LOST_PEER_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Interrupt, Prepare
from elastane.protocol.model import NO_RANK, Assignment, Failure, Fence, World

_IN_FORCE = (Phase.RUNNING, Phase.DRAINING, Phase.REGROUPING)


def is_in_place(state: State) -> bool:
    """Whether workers that came back recover in place; of those that were lost nobody knows."""
    return not state.unrecoverable and any(
        node.recoverable or node.recovers_in_place for node in state.nodes.values()
    )


def record_recoverable(state: State, node: KnownNode, workers: tuple[int, ...]) -> None:
    """Take note which workers of `node` can enter another world."""
    known = {i for i in workers if i < node.spec.local_world_size}
    if known - node.recoverable and state.in_place:
        state.note_arrival()
    node.recoverable = known
    state.reindex(node)
    sizing.record_sharding(state, node)
    state.partial_replicas = state.partial_replicas or sizing.reports_level(state, node)
    if state.phase in (Phase.RUNNING, Phase.DRAINING) and not (
        state.in_place or state.unrecoverable
    ):
        state.in_place = True
        state.log(EventKind.IN_PLACE, "all workers recover in place from now on")
        for waits in [each for each in state.nodes.values() if each.standby]:
            start_replacements(state, waits)  # Nobody could when it came.


def record_lost_peer(state: State, node: KnownNode, fence: Fence, reason: str) -> None:
    """A worker lost a peer; most often somebody tells in a moment what became of that one."""
    if fence == node.fence and state.is_member(node) and state.peer_lost_s is None:
        state.peer_lost_s, state.peer_lost_reason = (
            state.now_s,
            f"a worker of node {node.id} {reason}",
        )


def has_unexplained_peer_loss(state: State) -> bool:
    """Whether a worker lost a peer, and nothing else says so: the world makes no step."""
    if state.peer_lost_s is None:
        return False
    due_s = state.peer_lost_s + LOST_PEER_S
    if state.now_s < due_s:
        state.wait_until(due_s)
        return False
    liveness.ensure_incident(state, state.peer_lost_reason)
    return True


def log_stall(state: State) -> None:
    """Log where each worker waits, once all those of the world wait for one another."""
    assert state.world is not None
    if len(state.blocked) < len(state.world.members):
        state.stall_text = ""
    elif not state.stall_text:
        waiting = [each for node in state.members() for each in node.waits_at]
        state.stall_text = places_of(waiting)
        state.log(EventKind.STALL, f"no progress for {HANG_STALL_S:g} s: {state.stall_text}")


def end_if_stalled(state: State) -> bool:
    """End a world whose workers all only wait for one another: nobody is to blame."""
    assert state.world is not None
    if len(state.stalled) < len(state.world.members):
        return False
    reached = max((node.progress or 0 for node in state.members()), default=0)
    state.stalled_worlds = 1 if reached > state.stalled_at_step else state.stalled_worlds + 1
    state.stalled_at_step = reached
    liveness.ensure_incident(state, f"all workers wait for one another: {state.stall_text}")
    return True


def end_if_level(state: State) -> bool:
    """End a world that is not of whole replicas, once all its members are at one step."""
    if not any(sizing.reports_level(state, node) for node in state.members()):
        return False
    reason = "some of its nodes make no whole replica, and give way"
    state.incident = Incident(at_s=state.now_s, reason=reason, planned=True)
    return interrupt_world(state, reason)


def end_if_broken(state: State, node: KnownNode) -> None:
    """End a world that makes no step for what another coordinator saw, and paid for."""
    if state.phase not in _IN_FORCE or not state.is_member(node):
        return
    if node.uninformed:
        _uncharged_incident(state, f"node {node.id} was not told of {node.fence}")
    elif node.lost & {*node.workers}:
        _uncharged_incident(state, f"workers of node {node.id} are lost, and were paid for")
    elif node.interrupted and node.fence is not None:
        record_lost_peer(state, node, node.fence, node.interrupted)
    start_replacements(state, node)  # Its agent may have been told in vain, as it went.


def drop_charged(
    state: State, node: KnownNode, failures: tuple[Failure, ...], renewed: set[int]
) -> tuple[Failure, ...]:
    """Take note of failures that were charged before; return the others."""
    paid = tuple(f for f in failures if f.local_rank in renewed or node.is_known_loss(f))
    able, lost = {*node.recoverable}, {f.local_rank for f in paid}
    node.lose_workers(paid)
    node.recoverable = able  # Successors may have come since.
    node.replacing |= renewed
    state.reindex(node)
    end_if_broken(state, node)
    if lost - renewed:
        start_replacements(state, node)
    return tuple(f for f in failures if f not in paid)


def _uncharged_incident(state: State, reason: str) -> None:
    before = state.incident
    incident = liveness.ensure_incident(state, reason)
    if incident is not before:
        incident.charged = True


def interrupt_world(state: State, reason: str) -> bool:
    """End the step in hand of the world in force; its workers stay where they are."""
    assert state.world is not None
    state.enter(Phase.REGROUPING, reason)
    for node in state.members():
        state.send(node, Interrupt(fence=state.world.fence, reason=reason))
    return True


def has_survivors(state: State) -> bool:
    """Whether any worker has the state of the world in force, or all that it began with."""
    staying = [node for node in state.members() if node.survivors and not node.leaving]
    outside = [state.nodes[i] for i in state.displaced if i in state.nodes]
    kept = [n for n in outside if state_holders.is_displaced_holder(state, n) and not n.leaving]
    return bool(staying or kept) and sizing.hold_whole_state(state, staying + kept)


def is_beyond_healing(state: State) -> bool:
    """Whether a worker is lost that held what nobody else does: all begin from what was saved.

    Nodes say so of their own workers alone; that a part is lost with its node, `parts` sees.
    """
    return any(
        node.sharding is not None and node.sharding.sole and node.lost & {*node.workers}
        for node in state.members()
    )


def is_stepping(state: State) -> bool:
    """Whether any worker of the world in force still makes steps, though its node may leave."""
    return any(node.survivors for node in state.members())


def is_ending(state: State) -> bool:
    """Whether too few are left because some have finished their steps: nobody follows those."""
    finished = any(_finished(node) for node in state.members())
    found = _candidates(state)
    return finished and not (state.unreachable or _are_enough(state, found))


def may_return(state: State) -> bool:
    """Whether workers that have finished a loop of steps live on: another loop may follow."""
    return any(
        _finished(node) and node.state == "running" and not node.leaving for node in state.members()
    )


def _finished(node: KnownNode) -> set[int]:
    return set() if node.stopping else {*node.workers} - node.recoverable - node.lost


def stop_leaving(state: State) -> None:
    """Have workers stopped whose nodes leave, and which have no place (any more)."""
    for node in [state.nodes[i] for i in sorted(state.leaving & state.with_workers)]:
        member = state.is_member(node)
        if node.stopping or (member and state.phase is not Phase.REGROUPING):
            continue
        assert node.fence is not None
        node.stopping = node.standby = True
        state.reindex(node)
        state.stop(node, node.fence, node.leaving)


def commit_when_enough(state: State) -> bool:
    """Settle the next world as soon as enough workers are able; until then they wait."""
    incident = state.incident
    assert incident is not None and state.world is not None
    stop_leaving(state)
    if not sizing.replica_fits(state):
        return ending.no_replica(state)
    if state.unreachable:
        return False  # Its grace to come back is short, and bounded by presence.
    if not incident.charged and incident.is_chargeable:
        if ending.verdict_pending(state, incident):
            return False
        why = charge_replacements(state, incident)
        if why:
            return ending.failure(state, incident, why)
    replace_lost(state, incident, 0.0)  # Those lost since are paid for as well.
    found = _candidates(state)
    if not _are_enough(state, found):
        return _wait(state, sum(len(one.workers) for one in found), _needed(state, found))
    port_due_s = (
        state.world_began_s + 2 * state.spec.timing.silence_s + state.spec.timing.heartbeat_s
    )
    if found[0].node.offer_used and state.now_s < port_due_s:
        state.wait_until(port_due_s)  # The last world meets at its port; it tells of another.
        return False
    members = tuple(member_of(one.node.spec, one.workers) for one in found)
    floor = max(state.highest_fence.round if state.highest_fence else 0, state.world.fence.round)
    _commit(state, World(fence=Fence(floor + 1, 0), members=members), incident.reason)
    return True


def _commit(state: State, world: World, why: str) -> None:
    """Put the next world in force, and see to those who have no place in it."""
    assert state.world is not None
    before = state.members()
    holders = {*state.displaced}
    state_holders.record_displaced(state, state.world, world)
    state.finish_incident(why)
    forming.commit_world(state, world, why, holders)
    for node in before:
        if node.fence == world.fence or node.fence is None:
            continue
        node.standby = True
        state.reindex(node)


def _wait(state: State, workers: int, needed: int) -> bool:
    limit_s = state.spec.timing.join_timeout_s
    # Who is out of sight may come back, and there are enough; or train on while the job ends.
    if state.unpaid_incident is not None:
        due_s = state_holders.returning_until_s(state)
        if state.now_s >= due_s:
            return ending.failure(state, state.unpaid_incident, "its budget pays for no other")
        state.wait_until(due_s)
    if state.now_s >= state.phase_s + limit_s:
        return ending.too_few(state, len(_candidates(state)), sizing.fewest_nodes(state))
    prepare_standbys(state)
    reason = (
        f"{workers} of at least {needed} workers are left; they wait with all that they hold"
        f" for others, {limit_s:g} s at most"
    )
    if reason != state.phase_reason:
        state.phase_reason = reason
        state.log(EventKind.WAITING, reason, workers=workers, min_workers=needed)
    state.wait_until(state.phase_s + limit_s)
    return False


def _candidates(state: State) -> list[NodeWorkers]:
    """Return who could be in the next world: survivors in their order, then who came since."""
    assert state.world is not None
    order = {member.node_id: rank for rank, member in enumerate(state.world.members)}
    order = {**{i: len(order) + rank for i, rank in state.displaced.items()}, **order}
    go_on, is_sharded = is_stepping(state), _is_sharded(state)
    is_sure = go_on
    if state.incident is not None and not state.incident.planned:
        # Who is left in the world may have come with it, and made no step yet.
        is_sure = any(state_holders.rules_out_older_worlds(state, node) for node in state.members())
    staying: list[NodeWorkers] = []
    coming: list[NodeWorkers] = []
    for node in state.nodes.values():
        if node.session is None or node.leaving or node.stale or not node.recoverable:
            continue
        survivors = node.survivors if state.is_member(node) else ()
        if not is_sure and state_holders.is_displaced_holder(state, node):
            survivors = tuple(sorted(node.recoverable))
        one = NodeWorkers(node, survivors, tuple(sorted(node.recoverable - set(survivors))))
        if is_sharded and not survivors and len(one.joining) < node.spec.local_world_size:
            continue
        (staying if survivors else coming).append(one)
    staying.sort(key=lambda one: order[one.node.id])
    coming.sort(key=lambda one: one.node.order)
    most = sizing.most_nodes(state)
    if go_on and (state.incident is None or not state.incident.planned):
        # Too many give way at a boundary, where all are level. So are those beside the world
        # among themselves: one of them will do.
        inside = sum(state.is_member(one.node) for one in staying)
        most = max(most, min(inside + 1, len(staying)))
    # Who came to the boundary stays first: the others may lack the last step (`drained_late`).
    level = sorted(staying, key=lambda o: not (state.is_member(o.node) and o.node.drained))
    chosen = {one.node.id for one in sizing.choose_nodes(state, level, coming, most)}
    return [one for one in staying + coming if one.node.id in chosen]


def _are_enough(state: State, found: list[NodeWorkers]) -> bool:
    workers = sum(len(one.workers) for one in found)
    if not sizing.are_whole_replicas(state, found):
        return workers == sum(one.node.spec.local_world_size for one in found)
    return len(found) >= sizing.fewest_nodes(state) and workers >= _needed(state, found)


def _needed(state: State, found: list[NodeWorkers]) -> int:
    """Return how many workers a world of these nodes is to have at least.

    By default as many as the smallest of them have that are nodes enough: all of a job that has no
    node to spare, however its workers are spread over them.
    """
    fewest = sizing.fewest_nodes(state)
    largest = max((node.spec.local_world_size for node in state.nodes.values()), default=1)
    sizes = sorted(one.node.spec.local_world_size for one in found) + [largest] * fewest
    least = state.spec.min_workers or sum(sizes[:fewest])
    # None is left out: it may be a step ahead, and is the only one that knows.
    whole = sum(one.node.spec.local_world_size for one in found) if _is_sharded(state) else 0
    return max(least, whole)


def _is_sharded(state: State) -> bool:
    """Whether workers hold shards: then a node enters a world with all of its workers.

    A joining worker has no mesh before it has a place, and says nothing of shards itself.
    """
    return any(node.sharding is not None for node in state.nodes.values())


def prepare_standbys(state: State) -> None:
    """Have workers without a place start: of nodes that arrived, and successors of the lost."""
    if not state.in_place or state.world is None:
        return
    # Not all of the world in force: a node that departed has left its place to another.
    here = {node.id for node in state.members()}
    room = sizing.most_nodes(state) - len(here | state.with_standbys)
    arrived = sorted(state.idle - state.unready)
    for node in sizing.nodes_to_start_afresh(state):
        assert node.fence is not None
        node.stopping, node.recoverable = True, set()
        state.reindex(node)
        state.stop(node, node.fence, "begins anew: what its workers hold makes no whole replica")
    for node in [state.nodes[i] for i in arrived[: max(0, room)]]:
        node.fence, node.standby = state.world.fence, True
        state.reindex(node)
        state.send(node, Prepare(assignment=standby_assignment(state, state.world, node)))


def standbys_due(state: State) -> list[str]:
    """Return who has workers that are to be taken in now; empty: nobody, or not yet."""
    if state.unreachable or not state.with_standbys or not is_stepping(state):
        return []  # Workers that have finished their steps take nobody in.
    due_s = state.gathering_ends_s(incomplete=_is_incomplete(state))
    if state.now_s < due_s and _more_may_come(state):
        state.wait_until(due_s)
        return []
    return [one.node.id for one in _candidates(state) if one.joining]


def _more_may_come(state: State) -> bool:
    """Whether to gather: where nodes arrive, or successors are still getting ready."""
    joining = (state.nodes[i] for i in state.with_standbys)
    if not all(state.is_member(node) for node in joining):
        return True
    return any(node.replacing - node.recoverable for node in state.members())


def _is_incomplete(state: State) -> bool:
    """Whether others of a node that has workers for the next world are still getting ready."""
    for node in (state.nodes[i] for i in state.with_standbys):
        arriving = {*range(node.spec.local_world_size)} - node.lost
        coming = node.replacing if state.is_member(node) else node.replacing | arriving
        if coming - node.recoverable:
            return True
    return False


def start_replacements(state: State, node: KnownNode) -> None:
    """Have workers that were paid for followed by others, unless they are."""
    is_due = state.in_place and state.unpaid_incident is None and node.lost - node.replacing
    if is_due and state.world is not None:
        _prepare_replacements(state, state.world, node, 0.0)


def record_standby_failure(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> None:
    """Workers without a place ended: others follow them, as long as the budget pays for it."""
    node.lose_workers(failures)
    state.reindex(node)
    failures = tuple(msgspec.structs.replace(f, rank=NO_RANK) for f in failures)
    reason = f"a worker of node {node.id} ended before it had a place"
    incident = Incident(at_s=state.now_s, reason=reason, planned=False)
    incident.record(node.id, failures, state.now_s)
    why = charge_replacements(state, incident)
    if why:
        state.unpaid_incident = incident
        state.log(EventKind.WAITING, f"{reason}; nobody follows it: {why}", node.id)


def charge_replacements(state: State, incident: Incident) -> str:
    """Let the budget pay for replacements; returns why it does not."""
    verdict = ending.charge(state, incident, EventKind.REPLACEMENT)
    if not verdict.restart:
        return verdict.reason
    replace_lost(state, incident, verdict.delay_s)
    return ""


def replace_lost(state: State, incident: Incident, delay_s: float) -> None:
    """Have the workers that were lost followed by others, which wait for a place."""
    assert state.world is not None
    for node_id in sorted({sighting.node_id for sighting in incident.sightings}):
        node = state.nodes.get(node_id)
        if node is not None and node.lost - node.replacing and node.fence is not None:
            _prepare_replacements(state, state.world, node, delay_s)


def _prepare_replacements(state: State, world: World, node: KnownNode, delay_s: float) -> None:
    """Have the workers of this node that were lost followed by others."""
    node.replacing |= node.lost
    given = standby_assignment(state, world, node)
    state.send(node, Prepare(assignment=given, delay_s=delay_s, successors=True))


def standby_assignment(state: State, world: World, node: KnownNode) -> Assignment:
    """Return what workers are told that have no place yet: ranks of nobody, after all others."""
    base = world.world_size + node.order * node.spec.local_world_size
    return Assignment(
        fence=world.fence,
        node_rank=len(world.members),
        nodes=len(world.members) + 1,
        rank_base=base,
        world_size=world.world_size + 1,
        role_rank_base=base,
        role_world_size=world.world_size + 1,
        master_addr="",
        master_port=0,
        agent_store=False,
        restarts_used=state.budget.used,
        max_restarts=state.budget.allowed,
        reason=f"getting ready beside {world.fence}",
        in_place=True,
        waiting=True,
    )
