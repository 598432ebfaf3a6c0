"""DistributedDataParallel goes on over a group whose world changes."""

import pytest
from comms_bodies import KINDS
from comms_crew import Crew


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("when", [0, 2])
def test_a_backward_in_which_a_member_died_is_run_again_by_the_rest(kind, when):
    """`when` 0 is the first backward, before the buckets were laid out anew; 2 is after."""
    size = 3
    with Crew(size, "ddp_survives", kind, size, when) as crew:
        crew.hear_all()
        crew.say_all(0, 1)
        assert crew.hear_all(0, 1) == [True, True], "the loss was not noticed"
        assert crew.hear_all(0, 1) == [True, True], "other gradients than a new DDP's"


def test_a_survivor_and_a_joiner_reduce_the_same_buckets():
    with Crew(2, "ddp_joined", 2) as crew:
        first, second = crew.hear_all()
        assert first == second
