"""The check of states that agents stop: which later loss the stop is to blame for."""

from simulation.state_checks import StoppedState

# The workers of two nodes that hold one slice, each a shard of it; others hold slice 1.
STOPPED = StoppedState(14, "n6:0", frozenset({(0, 0), (0, 1)}))


def test_the_furthest_of_several_stopped_states_counts():
    behind, ahead = StoppedState(13, "n1:0"), StoppedState(15, "n2:0")
    assert STOPPED.with_stop(behind) == STOPPED and STOPPED.with_stop(ahead) == ahead


def test_stops_at_one_step_are_one_stopped_state():
    both = STOPPED.with_stop(StoppedState(14, "n3:0", frozenset({(1, 0)})))
    assert both.name == "n6:0" and both.shards == {(0, 0), (0, 1), (1, 0)}


def test_a_shard_that_others_hold_keeps_the_stopped_state():
    assert STOPPED.without_holder((1, 0), {(1, 0)}) is STOPPED


def test_a_shard_that_was_stopped_keeps_the_stopped_state():
    assert STOPPED.without_holder((0, 1), set()) is STOPPED


def test_the_end_of_the_only_holder_of_another_shard_loses_the_state_without_the_stop():
    assert STOPPED.without_holder((1, 0), {(0, 0), (1, 1)}) == StoppedState()
