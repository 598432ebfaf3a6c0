"""What agents bring along when they register: workers of the world in force, or of others.

Where there is no record, the last world is pieced together from what its agents hold. Workers of
no world that is in force are stopped.
"""

from __future__ import annotations

from elastane.coordinator.rules import recovery, replica_slices, reports, state_holders
from elastane.coordinator.rules.state import KnownNode, Phase, State, UnrecordedWorld
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Holding, Interrupt
from elastane.protocol.model import Assignment, Fence, Member


def record_workers(state: State, node: KnownNode, holding: Holding | None) -> None:
    """Record what workers an agent brings along, and have them stopped where they are stale."""
    node.fence, ends = holding.assignment.fence if holding else None, node.ends
    node.forget_workers()
    node.draining, node.stray = False, False
    _take_workers(state, node, holding, ends)
    if not node.stray:
        state_holders.note_accounted(state, node)


def _take_workers(
    state: State, node: KnownNode, holding: Holding | None, ends: dict[int, int]
) -> None:
    if holding is None:
        return
    assignment = holding.assignment
    fence = assignment.fence
    node.take_places(assignment.workers or tuple(range(node.spec.local_world_size)))
    node.waiting, node.able, node.ends = assignment.waiting, {*holding.able}, ends
    node.in_place, node.sharding = holding.in_place, holding.sharding
    replica_slices.record_sharding(state, node)
    place = missed_place(state, node, holding)
    if place is not None and state.world is not None:
        node.fence, node.untold = state.world.fence, True
        node.take_places(place.local_ranks)
        _bring(state, node, holding)
        return
    if _is_kept(state, node, holding):
        node.waiting = True
        _bring(state, node, holding)
        return
    if node.waiting:
        _bring(state, node, holding)
        _take_waiting(state, node, fence)
        return
    state.hold_up(fence)
    node.draining = holding.draining
    if state.world is None and state.phase in (Phase.FORMING, Phase.RECOVERING):
        _claim(state, node, holding)
    current = state.world.fence if state.world else (state.claim.fence if state.claim else None)
    if state.store_backed and current is not None and fence > current:
        # Another coordinator has settled it: this one is deposed, and its shell is to learn it.
        state.authority, node.stray = False, True
        state.tell(EventKind.AUTHORITY_LOST, f"node {node.id} has workers of {fence}", node.id)
        return
    node.stray = fence != current or not _in_world(state, node, assignment)
    if node.stray or state.phase is Phase.STOPPING:
        _stop(state, node, fence)
        return
    if holding.state == "succeeded":
        node.state = "succeeded"
        return
    if holding.state == "stopping":
        node.parting, node.able = True, set()
    else:
        _interrupt_again(state, node, holding)
    _bring(state, node, holding)


def _interrupt_again(state: State, node: KnownNode, holding: Holding) -> None:
    """Where its world has ended and it was told in vain: its workers may still make steps."""
    if state.phase is Phase.REGROUPING and state.incident is not None and not holding.halted:
        fence, reason = holding.assignment.fence, state.incident.reason
        state.send(node, Interrupt(fence=fence, reason=reason))


def missed_place(state: State, node: KnownNode, holding: Holding | None) -> Member | None:
    """Return the place that able workers have in the world in force, and have not heard of.

    They are of a world before it; this one makes no step without them, so nothing is lost yet.
    """
    world = state.world
    if holding is None or world is None or not holding.able or holding.state == "stopping":
        return None
    if holding.assignment.fence >= world.fence or not state.is_of_world(node.id):
        return None
    member = next(m for m in world.members if m.node_id == node.id)
    known = member.incarnation == node.spec.incarnation
    return member if known and member.workers else None


def _is_kept(state: State, node: KnownNode, holding: Holding) -> bool:
    """Whether the workers gave their places up to the world in force, and may have to stand in."""
    in_force = state.phase not in (Phase.FORMING, Phase.STOPPING)
    if not in_force or state.world is None or node.id not in state.kept:
        return False
    older = holding.assignment.fence < state.world.fence and not node.waiting
    return older and bool(holding.able) and holding.state != "stopping"


def _bring(state: State, node: KnownNode, holding: Holding) -> None:
    """Take in failures; those whose successors were paid for cost nothing again."""
    node.halted = holding.halted
    state.refile(node)
    failures = recovery.drop_charged(state, node, holding.failures, {*holding.renewed})
    reports.record_failures(state, node, failures)


def _take_waiting(state: State, node: KnownNode, fence: Fence) -> None:
    """Workers that wait for a place keep doing so where there will be one."""
    if state.phase in (Phase.FORMING, Phase.STOPPING):
        node.waiting = False
        node.stray = True
        _stop(state, node, fence)


def _in_world(state: State, node: KnownNode, assignment: Assignment) -> bool:
    """Whether the world in force has this very agent in that place."""
    rank = assignment.node_rank
    if state.world is None:
        claim = state.claim
        return (
            claim is not None
            and claim.of == _world_of(assignment)
            and (claim.seats.get(rank) == node.id)
        )
    if assignment.fence != state.world.fence or rank >= len(state.world.members):
        return False
    member = state.world.members[rank]
    return (member.node_id, member.incarnation) == (node.id, node.spec.incarnation)


def _world_of(assignment: Assignment) -> tuple[int, str, int]:
    """What tells two worlds of one fence apart, where a coordinator had forgotten the first."""
    return (assignment.nodes, assignment.master_addr, assignment.master_port)


def _claim(state: State, node: KnownNode, holding: Holding) -> None:
    """Rebuild the last world from what its agents hold, where there is no record of it."""
    assignment = holding.assignment
    claim = state.claim
    if claim is None or assignment.fence > claim.fence:
        for node_id in claim.seats.values() if claim is not None else ():
            _turn_out(state, node_id)
        claim = UnrecordedWorld(
            fence=assignment.fence, size=assignment.nodes, of=_world_of(assignment), seats={}
        )
        state.claim = claim
        if state.phase is Phase.FORMING:
            state.enter(
                Phase.RECOVERING,
                f"agents hold {claim.fence}: waiting for all {claim.size} of its nodes",
            )
    if (assignment.fence, _world_of(assignment)) == (claim.fence, claim.of):
        claim.seats[assignment.node_rank] = node.id


def _turn_out(state: State, node_id: str) -> None:
    """Have workers stopped whose world turned out not to be the last one."""
    node = state.nodes.get(node_id)
    if node is not None and node.fence is not None:
        node.stray = True
        _stop(state, node, node.fence)


def _stop(state: State, node: KnownNode, fence: Fence) -> None:
    state.stop(node, fence, f"{fence} is no longer in force")
