"""Recovery in place: surviving workers keep their processes and enter another world.

Owns when such a world is committed (`next_world` has which workers it consists of), the handling of
nodes and workers without a place, and the replacements for lost workers, which the restart budget
pays for. A world of the survivors follows at once if enough workers are left. The others get ready
meanwhile and join at a step boundary. Without a survivor all workers start afresh, which `machine`
decides.

`Joining` of the world decides the rest. If workers join at any time, a world that is too small
waits for them in memory, and the job fails if the budget does not pay for them. If they join by a
planned change, survivors continue alone after each fault, all restart if they are too few, and a
loss that the budget does not pay for is not replaced. If they never join, no loss is replaced or
charged.
"""

from __future__ import annotations

import msgspec

from elastane.coordinator.rules import cuts, ending, liveness, next_world, sizing
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import KnownNode, Place
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.diagnosis import sighting_text, unreached_address, without_noise
from elastane.protocol.hangs import HANG_STALL_S, waiting_text
from elastane.protocol.limits import LOST_PEER_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Interrupt, Prepare
from elastane.protocol.model import NO_RANK, Assignment, Failure, Fence, Joining, World
from elastane.protocol.words import counted

# After this many worlds in a row that stalled without a step, another world is of no use: the
# machines do not let their workers connect.
STALLS_MAX = 3

_WITH_WORLD = (MembershipPhase.RUNNING, MembershipPhase.DRAINING, MembershipPhase.REGROUPING)


def is_in_place(state: State) -> bool:
    """Whether the workers that came back recover in place; of lost ones nothing is known."""
    return not state.roster.unrecoverable and any(
        node.workers.recoverable or node.workers.recovers_in_place
        for node in state.roster.nodes.values()
    )


def record_recoverable(state: State, node: KnownNode, workers: tuple[int, ...]) -> None:
    """Record which workers of `node` can enter another world."""
    known = {i for i in workers if i < node.spec.local_world_size}
    if known - node.workers.recoverable and state.in_place.active:
        state.gathering.note_arrival(state.now_s)
    node.workers.recover(known)
    state.roster.reindex(node)
    sizing.record_sharding(state, node)
    if sizing.reports_level(state, node):
        state.in_place.note_partial(partial=True)


def begin_if_all_recover(state: State) -> None:
    """Let the current world recover in place, once all of its workers can.

    The last of them is known by a report, or by the registration of an agent whose session broke.
    A restart of all workers at the end of a drain is avoided if that comes during the drain.
    """
    if state.in_place.active or not is_in_place(state):
        return
    state.in_place.begin(active=True)
    state.log(EventKind.IN_PLACE, "all workers recover in place from now on")
    for standby in [n for n in state.roster.nodes.values() if n.place is Place.STANDBY]:
        start_replacements(state, standby)  # Its failures came before this was known.


def record_lost_peer(state: State, node: KnownNode, fence: Fence, reason: str) -> None:
    """Record that a worker lost a peer; a report that explains the loss usually follows."""
    if fence == node.fence and node.is_member:
        said = without_noise(reason)
        node.progress.record_refusal(unreached_address(reason), was_answered="refused" in reason)
        state.incidents.note_lost_peer(state.now_s, f"a worker of node {node.id} {said}")


def has_unexplained_peer_loss(state: State) -> bool:
    """Whether a worker lost a peer and no report explained it in time: the world makes no step."""
    if state.incidents.peer_lost_s is None:
        return False
    due_s = state.incidents.peer_lost_s + LOST_PEER_S
    if state.now_s < due_s:
        state.queue.wait_until(due_s)
        return False
    left = state.incidents.find_return()
    reason = state.incidents.peer_lost_reason if left is None else sighting_text(left)
    unreached = cuts.text(cuts.found(state)) if left is None else ""
    if unreached:
        # Workers that wait for a stopped one lose peers too, and it may move again after hours.
        _count_stall(state)
        reason = cuts.leave_out(state) or f"{reason}; {unreached}"
    liveness.ensure_incident(state, reason)
    return True


def end_cut_drain(state: State) -> bool:
    """End a drain if some nodes do not reach others: the world makes no step to a boundary."""
    log_stall(state)
    if not cuts.found(state):
        return False
    return end_if_stalled(state) or has_unexplained_peer_loss(state)


def log_stall(state: State) -> None:
    """Log where each worker waits, once all workers of the world wait for one another."""
    assert state.world is not None
    if len(state.roster.blocked) < len(state.world.members):
        state.incidents.stalls.note("", "")
        return
    unreached = cuts.text(cuts.found(state))
    if not state.incidents.stalls.text or (unreached and not state.incidents.stalls.unreached):
        waiting = [each for node in state.roster.members() for each in node.progress.waits_at]
        state.incidents.stalls.note(waiting_text(waiting), unreached)
        advice = f"; next: {cuts.ADVICE}" if unreached else ""
        state.log(
            EventKind.STALL,
            f"no progress for {HANG_STALL_S:g} s: {state.incidents.stalls.text}{advice}",
        )


def end_without_step(state: State) -> bool:
    """End a world that makes no step, for a reason that no failure explains."""
    if state.incidents.current is not None:
        return False
    if state.in_place.active:
        log_stall(state)
        if end_if_stalled(state):
            return True
    return has_unexplained_peer_loss(state) or _end_cut_world(state)


def end_if_stalled(state: State) -> bool:
    """End a world whose workers only wait for one another.

    No single worker is to blame, unless one called another collective than the others. Then no wait
    helps, and the world ends as soon as that is found.
    """
    assert state.world is not None
    found = state.incidents.standstill.mismatch
    if found is None and len(state.roster.blocked) < len(state.world.members):
        return False
    cut = "" if found else cuts.leave_out(state)
    if found is None and not cut and len(state.roster.stalled) < len(state.world.members):
        return False
    _count_stall(state)
    reason = f"all workers wait for one another: {state.incidents.stalls.text}"
    incident = liveness.ensure_incident(state, found.sentence if found else cut or reason)
    incident.blame = found
    return True


def has_stalled_too_often(state: State) -> bool:
    """Whether no other world is of use: each of several in a row made no step.

    If some nodes do not reach others, the network may come back. Then worlds are tried for as long
    as the job waits for nodes.
    """
    stalls = state.incidents.stalls
    tried_s = state.now_s - stalls.since_s
    is_tried = not cuts.found(state) or tried_s >= state.spec.timing.join_timeout_s
    return stalls.in_a_row > STALLS_MAX and is_tried


def _count_stall(state: State) -> None:
    """Count a world that ends without a step."""
    state.incidents.stalls.count(_steps_made(state), state.now_s)


def _steps_made(state: State) -> int:
    return max((node.progress.steps or 0 for node in state.roster.members()), default=0)


def end_if_level(state: State) -> bool:
    """End a world with a partial replica once all its members are at one step.

    Not before all of its workers can be regrouped: the others would be interrupted for ever.
    """
    if not state.in_place.active:
        return False
    if not any(sizing.reports_level(state, node) for node in state.roster.members()):
        return False
    reason = "some of its nodes complete no replica and leave the world"
    state.incidents.open(Incident(at_s=state.now_s, reason=reason, planned=True))
    return interrupt_world(state, reason)


def open_without_slices(state: State) -> str:
    """Open an incident for a first world that makes no whole replica; return the reason.

    Its workers hold nothing yet, and a worker that begins alone cannot load a checkpoint with those
    that come later. So all begin again, once enough nodes are there.
    """
    assert state.world is not None
    span = state.in_place.nodes_per_replica
    reason = f"{len(state.world.members)} nodes make no whole replicas of {span} nodes each"
    state.incidents.open(Incident(at_s=state.now_s, reason=reason, planned=True))
    return reason


def end_if_broken(state: State, node: KnownNode) -> None:
    """End a world that can make no step, for a reason that was charged before."""
    if state.phase not in _WITH_WORLD or not node.is_member:
        return
    if node.is_uninformed:
        _uncharged_incident(state, f"node {node.id} did not receive its assignment of {node.fence}")
    elif node.workers.lost_ranks:
        _uncharged_incident(state, f"workers of node {node.id} were lost, and were charged before")
    elif node.workers.interrupted and node.fence is not None:
        record_lost_peer(state, node, node.fence, node.workers.interrupted)
    # An earlier request may have been lost with the agent's session.
    start_replacements(state, node)


def drop_charged(
    state: State, node: KnownNode, failures: tuple[Failure, ...], renewed: set[int]
) -> tuple[Failure, ...]:
    """Record failures that were charged before; return the others."""
    paid = tuple(f for f in failures if f.local_rank in renewed or node.workers.is_known_loss(f))
    lost = {failure.local_rank for failure in paid}
    node.workers.lose_charged(paid, renewed)
    state.roster.reindex(node)
    end_if_broken(state, node)
    if lost - renewed:
        start_replacements(state, node)
    return tuple(f for f in failures if f not in paid)


def _end_cut_world(state: State) -> bool:
    """End a world that makes no collective, since some of its nodes do not reach others.

    Its workers start afresh, so a world of all nodes is not tried first: it would cost a restart.
    """
    if not cuts.stands_still(state):
        return False
    reason = cuts.leave_out(state)
    if not (reason or state.incidents.stalls.is_first(_steps_made(state))):
        return False
    _count_stall(state)
    unreached = f"{cuts.text(cuts.found(state))}; {cuts.ADVICE}"
    _uncharged_incident(state, reason or unreached)
    return True


def _uncharged_incident(state: State, reason: str) -> None:
    """Open an incident that costs no restart."""
    before = state.incidents.current
    incident = liveness.ensure_incident(state, reason)
    if incident is not before:
        incident.charge()


def interrupt_world(state: State, reason: str) -> bool:
    """Interrupt the current step of all members; their workers keep their state and wait."""
    assert state.world is not None
    state.enter(MembershipPhase.REGROUPING, reason)
    incident = state.incidents.current
    differs = incident is not None and incident.may_differ
    for node in state.roster.members():
        order = Interrupt(fence=state.world.fence, reason=reason, asks_calls=differs)
        state.queue.send(node, order)
    return True


def has_survivors(state: State) -> bool:
    """Whether workers here hold the whole state of the current world, or all that it began with."""
    staying = [node for node in state.roster.members() if node.survivors and not node.leaving]
    if state.incidents.is_state_lost:
        # The others of that world end too. Only workers that were no part of it may hold the state.
        staying = [node for node in staying if node.workers.holding_state & {*node.survivors}]
    outside = [state.roster.nodes[i] for i in state.holders.displaced if i in state.roster.nodes]
    kept = [
        node
        for node in outside
        if state.holders.is_displaced_holder(node) and not (node.leaving or node.is_left_out)
    ]
    return bool(staying or kept) and sizing.hold_whole_state(state, staying + kept)


def is_beyond_healing(state: State) -> bool:
    """Whether a lost worker alone held part of the state, so that all start from a checkpoint.

    A node reports this of its workers; `sizing` finds a slice that was lost with its node. In a
    mesh of another size, each worker lacks its new part.
    """
    return state.incidents.has_other_mesh or any(
        node.workers.sharding is not None and node.workers.sharding.sole and node.workers.lost_ranks
        for node in state.roster.members()
    )


def is_ending(state: State) -> bool:
    """Whether too few workers are left because others finished their steps and are not replaced."""
    finished = any(node.workers.finished for node in state.roster.members())
    found = next_world.next_world(state)
    return finished and not (state.roster.unreachable or next_world.are_enough(state, found))


def is_too_small(state: State) -> bool:
    """Whether too few workers are left in a world that no worker can join while it recovers."""
    if state.roster.unreachable or next_world.joining(state) is Joining.ANYTIME:
        return False
    return not next_world.are_enough(state, next_world.next_world(state))


def too_few_text(state: State) -> str:
    """Return in words why the workers that are left do not continue, and what would let them."""
    found = next_world.next_world(state)
    fewest, here = sizing.fewest_nodes(state), sum(len(one.workers) for one in found)
    if len(found) < fewest:
        return f"{counted(len(found), 'node')} of at least {fewest} left (--nnodes)"
    return (
        f"{counted(here, 'worker')} of at least {next_world.workers_needed(state, found)} left;"
        " a smaller --min-workers lets them continue"
    )


def may_return(state: State) -> bool:
    """Whether workers that finished a loop of steps are alive: they may begin another loop.

    One that ends slowly after an error looks the same until its agent reports its end.
    """
    return any(
        node.workers.finished - state.incidents.returned_of(node.id)
        and node.workers.state != "succeeded"
        and not node.leaving
        for node in state.roster.members()
    )


def stop_leaving(state: State) -> None:
    """Stop the workers of leaving nodes that have no place in the world."""
    for node in [
        state.roster.nodes[i] for i in sorted(state.roster.leaving & state.roster.with_workers)
    ]:
        member = node.is_member
        if node.workers.stopping or (member and state.phase is not MembershipPhase.REGROUPING):
            continue
        assert node.fence is not None
        if node.is_current:
            node.become_standby()
        node.workers.stop(keep_recoverable=True)
        state.roster.reindex(node)
        state.stop(node, node.fence, node.leaving)


def commit_when_enough(state: State) -> bool:
    """Commit the next world as soon as enough workers can enter it; until then they wait."""
    incident = state.incidents.current
    assert incident is not None and state.world is not None
    stop_leaving(state)
    if not sizing.replica_fits(state):
        return ending.no_replica(state)
    if state.roster.unreachable:
        return False  # The reconnect grace is short, and ends by itself.
    when = next_world.joining(state)
    is_due = incident.is_chargeable and not incident.charged
    if is_due and when is Joining.ANYTIME:
        if ending.verdict_pending(state, incident):
            return False
        why = charge_replacements(state, incident)
        if why:
            return ending.failure(state, incident, why)
    elif is_due and when is Joining.PLANNED:
        _charge_or_forgo(state, incident)
    if when is not Joining.NEVER:
        replace_lost(state, incident, 0.0)  # The charge covers workers lost since.
    found = next_world.next_world(state)
    if not next_world.are_enough(state, found):
        return _wait(state, found)
    port_due_s = (
        state.worlds.began_s + 2 * state.spec.timing.silence_s + state.spec.timing.heartbeat_s
    )
    if found[0].node.offer_used and state.now_s < port_due_s:
        # The last world uses this port; the node will offer another.
        state.queue.wait_until(port_due_s)
        return False
    state.incidents.finish(incident.reason, state.world.fence)
    _commit(state, state.world, found, incident.reason)
    return True


def _commit(state: State, before: World, found: list[sizing.NodeWorkers], why: str) -> None:
    """Commit the next world; note if it has fewer workers until a planned change."""
    when = next_world.joining(state)
    next_world.commit(state, found, why)
    if when is not Joining.ANYTIME and sum(len(one.workers) for one in found) < before.world_size:
        state.worlds.note_shrunk(before)


def log_shrunk(state: State, *, is_agreed: bool = False) -> bool:
    """Log that a world continues with fewer workers, once these agree to; return whether it does.

    Before that they may ask for a restart of all, since a lost worker cannot be missed. They agree
    as they meet; `is_agreed`: a step of this world proves it.
    """
    before, world = state.worlds.shrunk_from, state.world
    if not before or world is None or state.phase is not MembershipPhase.RUNNING:
        return False
    have_met = all(node.progress.met == world.fence.round for node in state.roster.members())
    if not (have_met or is_agreed):
        return False
    state.worlds.note_continued()
    reason = f"continues with {world.world_size} of {before} workers"
    state.log(EventKind.WAITING, reason, trains=True)
    return True


def _wait(state: State, found: list[sizing.NodeWorkers]) -> bool:
    workers = sum(len(one.workers) for one in found)
    needed = next_world.workers_needed(state, found)
    limit_s, left_s, next_step = state.join_limit_s, state.join_left_s, ending.MISSING_NODES
    if len(state.roster.nodes) >= sizing.fewest_nodes(state):
        # Replacements start on nodes that are here.
        limit_s = left_s = state.spec.timing.join_timeout_s
        next_step = ending.MISSING_WORKERS
    # Unreachable workers may come back, and then there are enough. They may also train on while the
    # job ends.
    if state.incidents.unpaid is not None:
        due_s = _returning_until_s(state)
        if state.now_s >= due_s:
            return ending.failure(
                state, state.incidents.unpaid, "the restart budget pays for no replacement"
            )
        state.queue.wait_until(due_s)
    if state.now_s >= state.stage.began_s + left_s:
        what = f"{workers} of at least {needed} workers were ready"
        nodes = [one.node.spec.node_id for one in found]
        return ending.too_few(state, what, nodes, limit_s, next_step)
    prepare_standbys(state)
    reason = (
        f"{workers} of at least {needed} workers are left; they keep their state and wait"
        f" for others, {round(left_s, 1):g} s at most"
    )
    if state.stage.explain(reason):
        state.log(EventKind.WAITING, reason, workers=workers, min_workers=needed)
    state.queue.wait_until(state.stage.began_s + left_s)
    return False


def must_wait_for_state(state: State) -> bool:
    """Whether to wait for unreachable workers; requests a tick at the end of the wait."""
    due_s = state.holders.wait_until_s(state.roster.members(), state.world)
    if state.now_s < due_s:
        state.queue.wait_until(due_s)
        return True
    if due_s:
        state.holders.clear_possibly_training()  # By now those workers have stopped themselves.
    return False


def _returning_until_s(state: State) -> float:
    """Return until when nodes may come back with workers that can join; 0: none may.

    That counts unreachable nodes, and members without which a new coordinator resumed the job.
    """
    since_s = state.holders.resumed_without_s
    members = state.world.members if state.world is not None and since_s else ()
    lacking = [m for m in members if m.node_id not in state.roster.nodes]
    late_s = 0.0
    if not all(state.owner.is_dead(member.incarnation) for member in lacking):
        late_s = since_s + state.spec.timing.fence_wait_s
    return max(state.holders.possibly_training_until_s(), late_s)


def prepare_standbys(state: State) -> None:
    """Start workers on nodes that arrived, as far as the next world has room for them."""
    if not state.in_place.active or state.world is None:
        return
    if next_world.joining(state) is Joining.NEVER:
        return
    # The record of the world does not count: a departed node has freed its place, and so has one
    # that is left out.
    here = {node.id for node in state.roster.members()} | state.roster.with_standbys
    room = sizing.most_nodes(state) - len(here - state.left_out.nodes.keys())
    arrived = sorted(state.roster.idle - state.roster.unready)
    for node in sizing.nodes_to_start_afresh(state):
        _start_afresh(state, node, "what its workers hold completes no replica")
    for node in _displaced_from_boundaries(state):
        _start_afresh(state, node, "its workers have no place and can join only as new ones")
    for node in [state.roster.nodes[i] for i in arrived[: max(0, room)]]:
        node.become_standby(state.world.fence)
        state.roster.reindex(node)
        state.queue.send(node, Prepare(assignment=standby_assignment(state, state.world, node)))


def _start_afresh(state: State, node: KnownNode, why: str) -> None:
    """Stop workers without a place; the node gets new ones once the next world has room."""
    assert node.fence is not None
    node.workers.stop()
    state.roster.reindex(node)
    state.stop(node, node.fence, f"restarts: {why}")


def _displaced_from_boundaries(state: State) -> list[KnownNode]:
    """Return nodes whose workers left a place where others join by planned changes alone.

    They are in the middle of their program, and the others continue without them.
    """
    if next_world.joining(state) is not Joining.PLANNED:
        return []
    return [n for n in state.roster.holders_of_workers() if _is_displaced(n)]


def _is_displaced(node: KnownNode) -> bool:
    held = node.workers
    here = node.place is Place.STANDBY and node.session is not None
    return here and held.left_place and not held.stopping


def replace_uncharged(state: State) -> None:
    """Start replacements for workers that were lost before others could join, at no cost.

    A script has no boundary until it makes its loader. What it lost before is replaced as in a
    growth, once for each loss.
    """
    if not state.in_place.active or next_world.joining(state) is not Joining.PLANNED:
        return
    for node in state.roster.holders_of_workers():
        if not (node.leaving or node.workers.stopping or node.session is None):
            start_replacements(state, node)


def standbys_due(state: State) -> list[str]:
    """Return the nodes with workers that join now; empty: there are none, or not yet."""
    if state.roster.unreachable or not state.roster.with_standbys or not state.roster.is_stepping():
        return []  # Workers that have finished their steps do not admit others.
    if state.now_s < state.joining_tries.not_before_s:
        state.queue.wait_until(state.joining_tries.not_before_s)
        return []
    timing, incomplete = state.spec.timing, _is_incomplete(state)
    due_s = state.gathering.ends_s(state.now_s, timing, incomplete=incomplete)
    if state.now_s < due_s and _more_may_come(state):
        state.queue.wait_until(due_s)
        return []
    return [one.node.id for one in next_world.next_world(state) if one.joining]


def _more_may_come(state: State) -> bool:
    """Whether to gather more: nodes arrive, or replacements are still starting."""
    joining = (state.roster.nodes[i] for i in state.roster.with_standbys)
    if not all(node.is_member for node in joining):
        return True
    return any(node.workers.replacing - node.workers.recoverable for node in state.roster.members())


def _is_incomplete(state: State) -> bool:
    """Whether some workers of a joining node are still starting."""
    for node in (state.roster.nodes[i] for i in state.roster.with_standbys):
        arriving = {*range(node.spec.local_world_size)} - node.workers.lost
        coming = node.workers.replacing if node.is_member else node.workers.replacing | arriving
        if coming - node.workers.recoverable:
            return True
    return False


def start_replacements(state: State, node: KnownNode) -> None:
    """Start replacements for lost workers that were already charged, unless they are starting."""
    is_due = (
        state.in_place.active
        and state.incidents.unpaid is None
        and node.workers.unreplaced
        and next_world.joining(state) is not Joining.NEVER
    )
    if is_due and state.world is not None:
        _prepare_replacements(state, state.world, node, 0.0)


def record_standby_failure(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> None:
    """Record that standby workers ended; they are replaced as long as the budget pays for it.

    No replacement could join a shrink-only world. A worker without a place there may also be one
    that an earlier world has lost, and that a new coordinator does not know.
    """
    node.workers.lose(failures)
    state.roster.reindex(node)
    when = next_world.joining(state)
    if when is Joining.NEVER:
        return
    failures = tuple(msgspec.structs.replace(f, rank=NO_RANK) for f in failures)
    reason = f"a worker of node {node.id} ended before it had a place"
    incident = Incident(at_s=state.now_s, reason=reason, planned=False)
    incident.record(node.id, failures, state.now_s)
    if when is Joining.PLANNED:
        _charge_or_forgo(state, incident)
    elif why := charge_replacements(state, incident):
        state.incidents.refuse_payment(incident)
        state.log(EventKind.WAITING, f"{reason}; it is not replaced: {why}", node.id, trains=True)


def _charge_or_forgo(state: State, incident: Incident) -> None:
    """Charge replacements; if the budget refuses, the others continue without them."""
    why = charge_replacements(state, incident)
    nodes = [state.roster.nodes[i] for i in _nodes_of(incident) if i in state.roster.nodes]
    news = [node.id for node in nodes if why and node.workers.forgo_lost()]
    if news:
        reason = f"{incident.reason}; no worker is replaced: {why}"
        state.log(EventKind.WAITING, reason, *news[:1], trains=True)


def charge_replacements(state: State, incident: Incident) -> str:
    """Charge replacements to the budget; return why it refuses, or an empty string."""
    retries_step = next_world.joining(state) is Joining.ANYTIME
    verdict = ending.charge(state, incident, EventKind.REPLACEMENT, retries_step=retries_step)
    if not verdict.restart:
        return verdict.reason
    replace_lost(state, incident, verdict.delay_s)
    return ""


def replace_lost(state: State, incident: Incident, delay_s: float) -> None:
    """Start replacements for the lost workers of an incident; they wait for a place as standbys."""
    assert state.world is not None
    for node_id in _nodes_of(incident):
        node = state.roster.nodes.get(node_id)
        if node is not None and node.workers.unreplaced and node.fence is not None:
            _prepare_replacements(state, state.world, node, delay_s)


def _nodes_of(incident: Incident) -> list[str]:
    return sorted({sighting.node_id for sighting in incident.sightings})


def _prepare_replacements(state: State, world: World, node: KnownNode, delay_s: float) -> None:
    """Ask the node for replacements of its lost workers."""
    node.workers.replace_lost()
    given = standby_assignment(state, world, node)
    state.queue.send(node, Prepare(assignment=given, delay_s=delay_s, successors=True))


def standby_assignment(state: State, world: World, node: KnownNode) -> Assignment:
    """Return the assignment of workers without a place: their ranks lie beyond all real ones."""
    base = world.world_size + node.order * node.spec.local_world_size
    coming = len(node.workers.replacing) if node.is_member else node.spec.local_world_size
    size = world.world_size + coming
    return Assignment(
        fence=world.fence,
        node_rank=len(world.members),
        nodes=len(world.members) + 1,
        rank_base=base,
        world_size=size,
        role_rank_base=base,
        role_world_size=size,
        master_addr="",
        master_port=0,
        agent_store=False,
        restarts_used=state.budget.used,
        max_restarts=state.budget.allowed,
        reason=f"starting as standby of {world.fence}",
        in_place=True,
        waiting=True,
    )
