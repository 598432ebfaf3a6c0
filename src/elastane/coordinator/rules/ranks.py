"""Which nodes are members of the next world, and in which order.

Survivors keep their relative order. A node that came back takes its former place, since a place
belongs to the node id. A requested node rank is honoured unless a survivor has it. All other nodes
follow in order of arrival. torchrun sorts by address string, so one arrival may move every rank
(pytorch issues 99684, 137402).

Where all workers start afresh, nodes of one rack or zone then get ranks next to each other, since a
ring of collectives sends from each rank to the next one. Survivors of one part keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastane.protocol.model import Assignment, Fence, NodeSpec, PortOffer, World, WorldMember


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node that could be a member; `order` is its order of arrival."""

    spec: NodeSpec
    order: int


def choose(
    previous: World | None, candidates: Sequence[Candidate], max_nodes: int, static: bool
) -> list[NodeSpec]:
    """Return the members of the next world in the order of node rank, at most `max_nodes`."""
    if static:
        ranked = sorted(candidates, key=lambda c: (c.spec.node_rank or 0, c.order))
        return [c.spec for c in ranked[:max_nodes]]
    places = {m.node_id: rank for rank, m in enumerate(previous.members)} if previous else {}
    survivors = sorted(
        (c for c in candidates if c.spec.node_id in places), key=lambda c: places[c.spec.node_id]
    )
    arrivals = sorted(
        (c for c in candidates if c.spec.node_id not in places), key=lambda c: c.order
    )
    room = max(0, max_nodes - len(survivors))
    order = _place([c.spec for c in survivors], [c.spec for c in arrivals[:room]])
    return grouped(order[:max_nodes])


def grouped(specs: Sequence[NodeSpec]) -> list[NodeSpec]:
    """Return the nodes so that those of one part of the network are next to each other.

    Each part stands where its first node stood, and its nodes keep their order. So the first node
    stays first, an order that is grouped already is kept, and nodes without a topology move only
    where a part before them gathers its nodes.
    """
    first: dict[tuple[str, ...], int] = {}
    for index, spec in enumerate(specs):
        for part in _parts(spec):
            first.setdefault(part, index)
    places = {
        spec.node_id: (*(first[part] for part in _parts(spec)), index)
        for index, spec in enumerate(specs)
    }
    return sorted(specs, key=lambda spec: places[spec.node_id])


def _parts(spec: NodeSpec) -> list[tuple[str, ...]]:
    """Return the parts of the network that a node is in, the largest first."""
    levels = tuple(filter(None, spec.topology.split("/")))
    return [levels[: depth + 1] for depth in range(len(levels))]


def _place(survivors: list[NodeSpec], arrivals: list[NodeSpec]) -> list[NodeSpec]:
    """Insert arrivals that request a rank at that index if it is free; append the others."""
    order = list(survivors)
    wishes = sorted(
        (spec for spec in arrivals if spec.node_rank is not None), key=lambda s: s.node_rank or 0
    )
    order += [spec for spec in arrivals if spec.node_rank is None]
    last = -1
    for spec in wishes:
        # Of two nodes that request one rank, the first to arrive gets it.
        last = min(max(spec.node_rank or 0, last + 1), len(order))
        order.insert(last, spec)
    return order


def member_of(spec: NodeSpec, workers: tuple[int, ...] = ()) -> WorldMember:
    """Return the member that `spec` describes, with `workers`; () means all of them."""
    return WorldMember(
        node_id=spec.node_id,
        incarnation=spec.incarnation,
        local_world_size=spec.local_world_size,
        role=spec.role,
        workers=workers,
        topology=spec.topology,
    )


def next_fence(previous: World | None, specs: Sequence[NodeSpec], floor: Fence | None) -> Fence:
    """Return the fence of a world of `specs`; the same membership is a new attempt of its round.

    The result is greater than `floor`, the highest fence that any agent reported.
    """
    if previous is not None and (floor is None or previous.fence >= floor):
        same = tuple(member_of(spec) for spec in specs) == previous.members
        if same:
            return Fence(previous.fence.round, previous.fence.attempt + 1)
        return Fence(previous.fence.round + 1, 0)
    return Fence(floor.round + 1 if floor else 1, 0)


class WorldAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an assignment that are the same for all nodes of a world."""

    master_addr: str
    offer: PortOffer
    restarts_used: int
    max_restarts: int
    reason: str
    in_place: bool = False


def assignments(world: World, place: WorldAssignment) -> list[Assignment]:
    """Return each member's assignment, in the order of node rank."""
    role_sizes: dict[str, int] = {}
    for member in world.members:
        role_sizes[member.role] = role_sizes.get(member.role, 0) + member.size
    role_base = dict.fromkeys(role_sizes, 0)
    base, result, size = 0, [], world.world_size
    for node_rank, member in enumerate(world.members):
        result.append(
            Assignment(
                fence=world.fence,
                node_rank=node_rank,
                nodes=len(world.members),
                rank_base=base,
                world_size=size,
                role_rank_base=role_base[member.role],
                role_world_size=role_sizes[member.role],
                master_addr=place.master_addr,
                master_port=place.offer.port,
                agent_store=place.offer.agent_store,
                restarts_used=place.restarts_used,
                max_restarts=place.max_restarts,
                reason=place.reason,
                workers=member.workers,
                in_place=place.in_place,
            )
        )
        base += member.size
        role_base[member.role] += member.size
    return result
