"""A node's place, its fence and the current world agree after every event of the histories."""

import pytest

from elastane.coordinator.rules import Rendezvous
from elastane.coordinator.rules.nodes import Place
from simulation import run_seed


def check(state, node):
    """Check one node against the current world."""
    assert (node.place is Place.IDLE) == (node.fence is None)
    if node.place is Place.MEMBER:
        assert node.fence == state.world.fence
    if node.place is Place.REPORTED:
        assert state.world is None
    if node.workers.stopping:
        assert node.place is not Place.IDLE
    if node.is_uninformed:
        assert node.place in (Place.MEMBER, Place.STANDBY) and node.agent_fence < node.fence


@pytest.mark.parametrize(
    ("kind", "unseen"),
    [
        ({}, {Place.STANDBY}),  # all workers start afresh, so none waits for a place
        ({"in_place": True}, set()),
        ({"in_place": True, "span": 2}, {Place.REPORTED}),  # too rare for so few histories
    ],
)
def test_every_place_is_reached_and_agrees_with_the_world(monkeypatch, kind, unseen):
    seen, handle = set(), Rendezvous.handle

    def checks(machine, event, now_s):
        effects = handle(machine, event, now_s)
        for node in machine._state.roster.nodes.values():
            check(machine._state, node)
            seen.add(node.place)
        return effects

    monkeypatch.setattr(Rendezvous, "handle", checks)
    for seed in range(20):
        run_seed(seed, store_backed=bool(seed % 2), **kind)
    assert seen >= {*Place} - unseen
