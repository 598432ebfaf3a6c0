"""A world can be aborted at any instant, which ends all waits in it."""

import signal

import pytest
from comms_bodies import OPERATIONS, TIMEOUT_S
from comms_crew import Crew

# Measured: 1 to 5 ms. The bound leaves room for a loaded machine, and none for the timeout of the
# group, which would also end a wait.
OUT_S = TIMEOUT_S / 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_aborting_ends_every_operation_that_waits_for_a_silent_member(size, record_property):
    names = list(OPERATIONS) if size == 3 else ["all_reduce", "barrier", "recv"]
    with Crew(size, "stuck_in", names, size) as crew:
        for name in names:
            crew.hear_all()
            crew.say_all(*range(size - 1))
            took = crew.hear_all(*range(size - 1))
            crew.say(size - 1)
            record_property(f"out_ms_{name}", [round(1000 * each, 1) for each in took])
            assert max(took) < OUT_S, (name, took)
        results = crew.hear_all(*range(size - 1))
    right = sum(range(1, size))
    assert [total for total, _ in results] == [right] * (size - 1)
    record_property("rebuilt_ms", [round(1000 * took, 1) for _, took in results])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_lost_member_continue_in_the_next_world(number, victim, record_property):
    # The victim is the last or the first by its place in the crew; ranks are by place.
    size = 3
    with Crew(size, "peer_lost", size) as crew:
        crew.hear_all()
        crew.kill(size - 1 if victim else 2, number)
        survivors = [each for each in range(size) if each != 2]
        crew.say_all(*survivors)
        outcomes = crew.hear_all(*survivors)
        assert all(failed for failed, _ in outcomes)
        record_property("out_ms", [round(1000 * took, 1) for _, took in outcomes])
        assert max(took for _, took in outcomes) < OUT_S
        assert crew.hear_all(*survivors) == [3.0, 3.0]


@pytest.mark.parametrize("operation", ["exchange", "irecv"])
def test_a_message_to_a_dead_peer_raises_peer_lost(operation):
    """A message may be the first operation to fail; any other error would end the worker."""
    with Crew(2, "begins_with_the_dead", operation) as crew:
        crew.hear_all()
        crew.kill(1)
        crew.say(0)
        assert crew.hear(0) == ("PeerLostError", True)
