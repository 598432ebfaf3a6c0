"""Bugs planted where a replica is of two nodes, and one of the four is lost in a step's update."""

import pytest

from elastane.coordinator.rules import machine, recovery, sizing
from elastane.coordinator.rules.incident import Incident
from simulation import in_place_workers
from simulation.checks import Violation
from simulation.transcript import Play

# In this one, those who make no whole replica are the only ones that made the update.
AHEAD = 209


@pytest.fixture(autouse=True)
def slow_updates(monkeypatch):
    monkeypatch.setattr(in_place_workers, "_APPLY_SHARE", 0.9)


def lose_a_node(seed):
    play = Play()
    play.do(f"job nodes=2:4 restarts=5 steps=60 recovers=in-place mode=store span=2 seed={seed}")
    play.do("boot n0 n1 n2 n3"), play.do("run 12")
    play.do(f"run {seed % 20 / 14}"), play.do("crash n3"), play.do("run 6")
    assert "complete no replica and leave the world" in play.cluster.story.text()
    return play


def test_no_survivor_is_left_out_before_all_are_at_one_step():
    for seed in range(160, 230):
        play = lose_a_node(seed)
        assert play.cluster.checks.nodes_stepped == 2 and not play.cluster.checks.restarts_used


def test_survivors_that_make_no_whole_replica_and_are_left_out_at_once_are_found(monkeypatch):
    monkeypatch.setattr(sizing, "_is_level", lambda state: True)
    with pytest.raises(Violation, match="continues from step 6 without n2"):
        lose_a_node(AHEAD)


def test_a_world_that_ends_before_all_its_members_are_at_one_step_is_found(monkeypatch):
    def hasty(state):
        incident = Incident(at_s=state.now_s, reason="leave the world", planned=True)
        state.incidents.open(incident)
        return recovery.interrupt_world(state, "leave the world")

    monkeypatch.setattr(recovery, "end_if_level", hasty)
    with pytest.raises(Violation, match="continues from step 6 without n2"):
        lose_a_node(AHEAD)


def test_a_world_of_no_whole_replicas_that_does_not_end_is_found(monkeypatch):
    monkeypatch.setattr(recovery, "end_if_level", lambda state: False)
    with pytest.raises(AssertionError, match="leave the world"):
        lose_a_node(90)


def grow_from_one_node():
    play = Play()
    play.do("job nodes=1:2 restarts=5 steps=60 recovers=in-place mode=store span=2 seed=1")
    play.do("boot n0"), play.do("run 8"), play.do("boot n1"), play.do("run 10")
    return play.cluster.checks


def test_a_job_that_begins_with_half_a_replica_uses_no_restart_when_it_grows():
    checks = grow_from_one_node()
    assert checks.nodes_stepped == 2 and not checks.restarts_used


def test_a_first_world_of_half_a_replica_that_continues_in_place_is_found(monkeypatch):
    monkeypatch.setattr(machine, "_end_partial", recovery.end_if_level)
    assert grow_from_one_node().restarts_used
