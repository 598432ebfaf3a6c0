"""Who follows workers that were lost where others go on, and that the budget pays for it.

A successor gets ready beside the world in force, and has a place in a later one (`regroup`).
"""

from __future__ import annotations

import msgspec

from elastane.coordinator.rules import ending
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.state import KnownNode, State
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Prepare
from elastane.protocol.model import NO_RANK, Assignment, Failure, World


def start_replacements(state: State, node: KnownNode) -> None:
    """Have workers that were paid for followed by others, unless they are."""
    is_due = state.in_place and state.exhausted is None and node.lost - node.prepared
    if is_due and state.world is not None:
        _prepare_replacements(state, state.world, node, 0.0)


def record_standby_failure(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> None:
    """Workers without a place ended: others follow them, as long as the budget pays for it."""
    node.lose(failures)
    state.refile(node)
    failures = tuple(msgspec.structs.replace(f, rank=NO_RANK) for f in failures)
    reason = f"a worker of node {node.id} ended before it had a place"
    incident = Incident(at_s=state.now_s, reason=reason, planned=False)
    incident.see(node.id, failures, state.now_s)
    why = charge_replacements(state, incident)
    if why:
        state.exhausted = incident
        state.tell(EventKind.WAITING, f"{reason}; nobody follows it: {why}", node.id)


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
        if node is not None and node.lost - node.prepared and node.fence is not None:
            _prepare_replacements(state, state.world, node, delay_s)


def _prepare_replacements(state: State, world: World, node: KnownNode, delay_s: float) -> None:
    """Have the workers of this node that were lost followed by others."""
    node.prepared |= node.lost
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
