"""Each bug planted in the change of a job's range, and in how nodes leave, is found by seeds."""

import pytest

from elastane.coordinator.rules import admission, liveness, machine, next_world, sizing
from elastane.protocol.messages import Release
from simulation import HistoryFailedError, run_seed
from simulation.checks import Violation
from simulation.transcript import Play


def first_failure(seeds):
    for seed in range(seeds):
        try:
            run_seed(seed, store_backed=True)
        except HistoryFailedError as fault:
            return str(fault)
    pytest.fail(f"{seeds} seeds did not find the bug")


def made_smaller():
    """Lower the maximum, and kill a worker at each twentieth of a second that follows."""
    for number in range(20, 80):
        play = Play()
        play.do("job nodes=1:3 restarts=5 steps=60 recovers=in-place mode=store min-workers=1")
        play.do("boot n0 n1 n2"), play.do("run 12")
        play.cluster.drained = True
        play.cluster.resize(1, 2)
        play.do(f"run {number / 20}"), play.do("kill-worker n2"), play.do("run 4")


def test_nodes_that_keep_their_places_though_there_are_too_many_are_found(monkeypatch):
    leaving = sizing.reason_to_shrink

    def only_those_who_leave(state):
        reason = leaving(state)
        return "" if "leave the world" in reason else reason

    monkeypatch.setattr(sizing, "reason_to_shrink", only_those_who_leave)
    assert "nothing was" in first_failure(300)


def test_a_range_that_the_next_coordinator_does_not_take_over_is_found(monkeypatch):
    monkeypatch.setattr(admission, "_job_of", lambda state, join: join.spec)
    assert "was refused" in first_failure(300)


def test_a_fault_that_drops_survivors_since_there_are_too_many_is_found(monkeypatch):
    original = next_world._in_place

    def at_most(state):
        return original(state)[: state.spec.max_nodes]

    made_smaller()
    monkeypatch.setattr(next_world, "_in_place", at_most)
    with pytest.raises(Violation, match="continues from step 9 without"):
        made_smaller()


def test_a_drained_node_that_is_counted_as_departed_is_found(monkeypatch):
    original = liveness.depart

    def releases_and_remembers(state):
        gone = sorted(state.roster.leaving - state.roster.with_workers)
        for node in [state.roster.nodes[i] for i in gone]:
            state.queue.send(node, Release(node.leaving))

    def forgets_that_it_left(state, node, why):
        node.leaving = ""
        original(state, node, why)

    monkeypatch.setattr(machine, "_release_leaving", releases_and_remembers)
    monkeypatch.setattr(liveness, "depart", forgets_that_it_left)
    assert "was counted as departed" in first_failure(200)
