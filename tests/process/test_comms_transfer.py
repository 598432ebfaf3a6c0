"""A state transfer is complete, or the receiver knows that it has no state."""

import signal

import pytest
from comms_crew import Crew

CHANNELS = pytest.mark.parametrize("how", ["group", "memory"])


@CHANNELS
@pytest.mark.parametrize("size", [2, 4])
def test_a_taker_has_the_givers_state_and_each_byte_came_once(size, how):
    with Crew(size, "transfers", size, how) as crew:
        outcomes = crew.hear_all()
    assert len({digest for digest, _ in outcomes}) == 1
    (_, taken), *given = outcomes
    assert taken == sum(sent for _, sent in given)
    assert all(sent >= taken // size for _, sent in given), "a stripe of each giver"


@CHANNELS
def test_only_differing_tensors_are_sent(how):
    with Crew(2, "transfer_of_some", how) as crew:
        assert crew.hear(0) == (4_000_000, ["state['weights'][2]"], 1)


@CHANNELS
@pytest.mark.parametrize("what", ["giver", "taker"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_interrupted_transfer_gives_no_state(how, what, number):
    """Two workers give. The test ends the world of the living workers, as their agents would."""
    with Crew(3, "transfer_cut", 3, how, what) as crew:
        assert crew.hear_all() == ["in"] * 3
        victim = 2 if what == "giver" else 0
        assert crew.hear(victim) == "hit"
        crew.kill(victim, number)
        if what == "giver" and number == signal.SIGSTOP:
            assert crew.is_silent(0, 1.0), "it believed a giver that had not come to an end"
        others = {0, 1, 2} - {victim}
        for each in others:
            crew.say(each)
        said = {each: crew.hear(each) for each in others}
        assert said.get(0, "failed") == "failed"
        assert what == "giver" or set(said.values()) == {"failed"}


@CHANNELS
def test_one_wrong_bit_is_noticed(how):
    with Crew(2, "transfer_spoilt", how) as crew:
        assert crew.hear_all() == ["state-digest", "sent"]


@pytest.mark.parametrize("how", ["refused", "another"])
def test_state_goes_over_the_group_if_a_process_cannot_read_the_other(how):
    with Crew(2, "transfer_without_memory", how) as crew:
        assert len(set(crew.hear_all())) == 1


@pytest.mark.parametrize("what", ["bytes", "length", "spec", "kind", "huge", "probes", "digests"])
def test_garbage_from_a_giver_is_refused(what):
    with Crew(2, "transfer_of_garbage", what) as crew:
        assert crew.hear(0) == "state-wire"


@pytest.mark.parametrize(
    "pieces",
    [["want", [[1, 0, 4]]], ["want", [[0, 8, 4]]], ["want", [[0, 0, 13]]], ["ask", [1]], ["no"]],
    ids=["tensor", "order", "end", "digest", "word"],
)
def test_garbage_from_a_taker_is_refused(pieces):
    with Crew(2, "transfer_wanted", pieces) as crew:
        assert crew.hear(1) == "state-wire"
