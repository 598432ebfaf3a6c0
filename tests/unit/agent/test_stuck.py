"""How long workers have been in uninterruptible sleep without a break."""

from elastane.agent.hang_monitor import StuckWatch, states_of


def test_a_process_is_given_up_after_the_whole_time_in_state_d():
    watch = StuckWatch(10.0)
    assert watch.look({1: "D", 2: "S"}, 0.0) == []
    assert watch.look({1: "D", 2: "D"}, 9.9) == []
    assert watch.look({1: "D", 2: "D"}, 10.0) == [1]
    assert watch.look({1: "D", 2: "D"}, 20.0) == [1, 2]


def test_any_other_state_restarts_the_time():
    watch = StuckWatch(10.0)
    watch.look({1: "D"}, 0.0)
    watch.look({1: "R"}, 5.0)
    assert watch.look({1: "D"}, 10.0) == []
    watch.look({}, 12.0)
    assert watch.look({1: "D"}, 20.0) == [], "a number that comes again is another process"


def test_each_limit_has_several_looks_at_most_a_second_apart():
    assert StuckWatch(1.0).pause_s <= 0.2
    assert StuckWatch(1000.0).pause_s == 1.0


def test_states_are_those_of_the_kernel_and_of_living_processes_only():
    import os

    assert states_of([os.getpid(), 1 << 30]) == {os.getpid(): "R"}
