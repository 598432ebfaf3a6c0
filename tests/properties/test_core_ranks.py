"""Properties of the choice of nodes, of their order, and of the assigned ranks."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastane.coordinator.rules import invariants
from elastane.coordinator.rules.ranks import (
    Candidate,
    WorldAssignment,
    assignments,
    choose,
    grouped,
    member_of,
    next_fence,
)
from elastane.protocol.model import Fence, NodeSpec, PortOffer, Versions, World

VERSIONS = Versions(elastane="0.1", python="3.11")
IDS = [f"n{i}" for i in range(12)]


SOME_IDS = st.lists(st.sampled_from(IDS), unique=True, min_size=1)


TOPOLOGIES = st.sampled_from(["", "z1", "z1/r1", "z1/r2", "z2/r1", "z2/r1/h1", "z2/r1/h2", "r1"])


@st.composite
def nodes(draw, has_topology=False):
    return [
        NodeSpec(
            node_id=node_id,
            incarnation=draw(st.sampled_from("12")),
            local_world_size=draw(st.integers(1, 8)),
            role=draw(st.sampled_from(["trainer", "reader"])),
            node_rank=draw(st.none() | st.integers(0, 15)),
            topology=draw(TOPOLOGIES) if has_topology else "",
            versions=VERSIONS,
        )
        for node_id in draw(SOME_IDS)
    ]


def world_of(fence, specs):
    return World(fence=fence, members=tuple(member_of(spec) for spec in specs))


def candidates(specs):
    return [Candidate(spec=spec, order=order) for order, spec in enumerate(specs)]


@given(nodes(), nodes(), st.integers(1, 12))
def test_survivors_keep_their_order_and_their_ranks(before, now, max_nodes):
    previous = world_of(Fence(1, 0), before[:max_nodes])
    chosen = choose(previous, candidates(now), max_nodes, static=False)
    world = world_of(next_fence(previous, chosen, previous.fence), chosen)
    assert not invariants.broken_succession(previous, world)
    assert len(chosen) == min(max_nodes, len(now))
    ids = {spec.node_id for spec in chosen}
    assert len(ids) == len(chosen)
    survivors = {spec.node_id for spec in now} & {m.node_id for m in previous.members}
    assert survivors <= ids


@given(nodes(), nodes(), st.integers(1, 12))
def test_an_arrival_without_a_requested_rank_comes_after_all_survivors(before, now, max_nodes):
    previous = world_of(Fence(1, 0), before[:max_nodes])
    known = {m.node_id for m in previous.members}
    chosen = choose(previous, candidates(now), max_nodes, static=False)
    places = [s.node_id in known for s in chosen if s.node_id in known or s.node_rank is None]
    assert places == sorted(places, reverse=True)


@given(st.permutations(range(6)))
def test_every_requested_rank_is_assigned(wishes):
    specs = [
        NodeSpec(
            node_id=IDS[i],
            incarnation="1",
            local_world_size=1,
            node_rank=wish,
            versions=VERSIONS,
        )
        for i, wish in enumerate(wishes)
    ]
    for static in (True, False):
        chosen = choose(None, candidates(specs), 6, static=static)
        assert [spec.node_rank for spec in chosen] == list(range(6))


@given(nodes())
def test_a_rank_that_two_nodes_request_goes_to_the_first_arrival(specs):
    chosen = choose(None, candidates(specs), 12, static=False)
    order = {spec.node_id: i for i, spec in enumerate(specs)}
    for one, other in itertools.pairwise(chosen):
        if one.node_rank is not None and one.node_rank == other.node_rank:
            assert order[one.node_id] < order[other.node_id]


@given(nodes())
def test_ranks_are_contiguous_over_the_job_and_over_each_role(specs):
    world = world_of(Fence(4, 2), specs)
    place = WorldAssignment(
        master_addr="10.0.0.1",
        offer=PortOffer(1, True),
        restarts_used=0,
        max_restarts=0,
        reason="",
    )
    given_ = assignments(world, place)
    assert not invariants.broken_ranks(world, given_)
    ranks = [a.rank_base + i for a, s in zip(given_, specs, strict=True)
             for i in range(s.local_world_size)]  # fmt: skip
    assert ranks == list(range(world.world_size))
    for role in ("trainer", "reader"):
        own = [(a, s) for a, s in zip(given_, specs, strict=True) if s.role == role]
        roles = [a.role_rank_base + i for a, s in own for i in range(s.local_world_size)]
        assert roles == list(range(len(roles)))
        assert all(a.role_world_size == len(roles) for a, _ in own)


@given(nodes(), nodes(), st.integers(1, 5), st.integers(0, 5), st.integers(0, 9))
def test_a_new_fence_exceeds_every_reported_one(before, now, round_, attempt, floor_round):
    previous = world_of(Fence(round_, attempt), before)
    floor = Fence(floor_round, 3)
    fence = next_fence(previous, now, floor)
    assert fence > previous.fence and fence > floor
    same = world_of(fence, now).members == previous.members
    assert (fence.round == previous.fence.round) == (same and previous.fence >= floor)


@given(nodes(has_topology=True))
def test_nodes_of_one_part_of_the_network_are_next_to_each_other_in_their_order(specs):
    order = grouped(specs)
    assert sorted(spec.node_id for spec in order) == sorted(spec.node_id for spec in specs)
    assert order[0] == specs[0] and grouped(order) == order
    levels = [tuple(spec.topology.split("/")) for spec in order if spec.topology]
    for part in {level[:depth] for level in levels for depth in range(1, len(level) + 1)}:
        inside = ["/".join(part) == "/".join(s.topology.split("/")[: len(part)]) for s in order]
        assert sum(1 for on, _ in itertools.groupby(inside) if on) == 1, (part, order)
    for topology in {spec.topology for spec in specs}:
        assert [s for s in order if s.topology == topology] == [
            s for s in specs if s.topology == topology
        ]


@given(nodes(has_topology=True), nodes(has_topology=True), st.integers(1, 12))
def test_worlds_of_nodes_with_a_topology_follow_each_other(before, now, max_nodes):
    previous = world_of(Fence(1, 0), grouped(before[:max_nodes]))
    chosen = choose(previous, candidates(now), max_nodes, static=False)
    world = world_of(next_fence(previous, chosen, previous.fence), chosen)
    assert not invariants.broken_succession(previous, world)
    assert grouped(chosen) == chosen
