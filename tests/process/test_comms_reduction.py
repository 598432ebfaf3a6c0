"""Over real process groups the sum over virtual shards has the same bits in every world."""

import pytest
from comms_crew import Crew


@pytest.mark.parametrize(("shards", "count"), [(8, 10_007), (6, 5), (5, 1), (12, 3)])
def test_worlds_of_one_to_five_have_the_same_sum(shards, count):
    with Crew(5, "tree_sums", 5, shards, count) as crew:
        digests = [digest for each in crew.hear_all() for digest in each]
        assert len(digests) == 15
        assert len(set(digests)) == 1
