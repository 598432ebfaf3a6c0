"""DistributedDataParallel continues over a group whose world changes."""

import pytest
from comms_bodies import KINDS
from comms_crew import Crew


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("when", [0, 2])
def test_a_backward_in_which_a_member_died_is_run_again_by_the_rest(kind, when):
    """`when` 0 is the first backward, before DDP has rebuilt its buckets; 2 is after."""
    size = 3
    with Crew(size, "ddp_survives", kind, size, when) as crew:
        crew.hear_all()
        crew.say_all(0, 1)
        assert crew.hear_all(0, 1) == [True, True], "the loss was not noticed"
        assert crew.hear_all(0, 1) == [True, True], "other gradients than a new DDP's"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_survivor_and_a_joiner_make_the_same_collectives(kind):
    """The survivor has rebuilt its buckets, has evaluated, and was within no_sync()."""
    with Crew(2, "ddp_joined", 2, kind) as crew:
        first, second = crew.hear_all()
        assert first == second


@pytest.mark.parametrize(
    ("otherwise", "words"),
    [
        ("frozen", "no others on rank 0, ['even.weight float32[8, 64]'] on rank 1"),
        ("static", "static_graph of DistributedDataParallel 0: True on rank 0, False on rank 1"),
        ("unused", "find_unused_parameters of DistributedDataParallel 0: True on rank 0"),
        ("buckets", "bucket_cap_mb of DistributedDataParallel 0: [3.0] on rank 0, [25.0] on rank"),
        ("buffers", "buffers of DistributedDataParallel 0: ['body.1.more float32[2]'] on rank 0"),
    ],
)
def test_differing_ddps_are_reported_with_both_values_on_all_members(otherwise, words):
    with Crew(2, "ddp_differs", 2, otherwise) as crew:
        for told in crew.hear_all():
            assert words in told and "[job-ddp]" in told, told
        crew.say_all()
