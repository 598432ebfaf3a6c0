"""What must always hold, as checks that production asserts and the simulation runs.

Each function returns a sentence that says what is broken, or an empty string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastane.protocol.model import Assignment, JobRecord, JobSpec, World, world_bounds


def broken_succession(previous: World | None, world: World) -> str:
    """Fences only grow, a round has one membership, and survivors keep their order.

    Those of different parts of the network may change it, as a part's nodes are next to each other.
    """
    if previous is None:
        return ""
    if world.fence <= previous.fence:
        return f"{world.fence} was committed after {previous.fence}"
    if world.fence.round == previous.fence.round and world.members != previous.members:
        return f"two memberships in round {world.fence.round}"
    if any(m.workers for m in world.members):
        return ""  # Such a world orders workers, and the record does not know their processes.
    before = [m.node_id for m in previous.members]
    known, after = {*before}, {m.node_id for m in world.members}
    for part in dict.fromkeys(m.topology for m in world.members):
        same = {m.node_id for m in world.members if m.topology == part}
        survivors = [node_id for node_id in before if node_id in after & same]
        order = [m.node_id for m in world.members if m.node_id in known & same]
        if survivors != order:
            return f"survivors {survivors} were put in the order {order}"
    return ""


def broken_size(
    spec: JobSpec,
    previous: World | None,
    world: World,
    holders: Collection[str] = frozenset(),
    span: int = 1,
) -> str:
    """A world has MIN to MAX nodes, each once, or the nodes of one replica.

    `span` is the number of nodes of a replica. A world of state holders alone may be larger, and
    one with partial replicas may be smaller.
    """
    count = len(world.members)
    before = {m.node_id for m in previous.members} | {*holders} if previous else set[str]()
    survivors = count if all(m.node_id in before for m in world.members) else 0
    fewest, most = world_bounds(spec.min_nodes, spec.max_nodes, span)
    least = 1 if span > 1 and survivors else min(fewest, spec.min_nodes)
    if not least <= count <= max(most, spec.max_nodes, survivors):
        return f"{world.fence} has {count} nodes, of {spec.min_nodes} to {spec.max_nodes}"
    if len({m.node_id for m in world.members}) != count:
        return f"{world.fence} holds a node twice"
    return ""


def broken_ranks(world: World, given: Sequence[Assignment]) -> str:
    """Ranks are contiguous from 0, over the job and over each role."""
    base, roles = 0, dict[str, int]()
    for node_rank, (member, assignment) in enumerate(zip(world.members, given, strict=True)):
        role_base = roles.get(member.role, 0)
        found = (assignment.node_rank, assignment.rank_base, assignment.role_rank_base)
        if found != (node_rank, base, role_base):
            return f"{world.fence}: node rank {node_rank} was given {found}"
        base += member.size
        roles[member.role] = role_base + member.size
    if any(a.world_size != base or a.fence != world.fence for a in given):
        return f"{world.fence}: assignments disagree on world size or fence"
    return ""


def broken_record(previous: JobRecord | None, record: JobRecord) -> str:
    """The durable record never goes back, and counts no more restarts than are allowed."""
    if record.restarts_used > record.spec.max_restarts:
        return f"{record.restarts_used} restarts were used of {record.spec.max_restarts} allowed"
    if previous is None:
        return ""
    if previous.outcome is not None and record.outcome != previous.outcome:
        return "the outcome of an ended job was changed"
    if record.restarts_used < previous.restarts_used:
        return f"restarts used went from {previous.restarts_used} to {record.restarts_used}"
    if previous.world is None or record.world == previous.world:
        return ""
    if record.world is None:
        return "the world was forgotten"
    return broken_succession(previous.world, record.world)
