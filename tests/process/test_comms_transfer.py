"""State goes from a donor to its receivers whole, or they know that they have none."""

import pytest
from comms_crew import Crew


@pytest.mark.parametrize("size", [2, 4])
def test_receivers_have_the_donors_state(size, record_property):
    with Crew(size, "transfers", size) as crew:
        outcomes = crew.hear_all()
        assert len({digest for digest, _ in outcomes}) == 1
        record_property("bytes_per_s", outcomes[-1][1])


def test_a_transfer_that_was_cut_short_gives_no_state():
    with Crew(2, "transfer_cut") as crew:
        crew.hear(0)
        crew.say(0)
        assert crew.hear(0) == "failed"


def test_one_wrong_bit_is_noticed():
    with Crew(2, "transfer_spoilt") as crew:
        assert crew.hear_all() == ["state-digest", "sent"]
