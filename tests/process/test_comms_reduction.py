"""Over real process groups the mean over virtual shards has the same bits in every world."""

import pytest
from comms_crew import Crew


@pytest.mark.parametrize(
    ("shards", "count", "by_collectives"),
    [(8, 200_003, False), (6, 5, False), (5, 1, False), (12, 3, False), (7, 1009, True)],
)
def test_worlds_of_one_to_five_have_the_same_mean(shards, count, by_collectives):
    with Crew(5, "tree_means", 5, shards, count, by_collectives) as crew:
        digests = [digest for each in crew.hear_all() for digest in each]
        assert len(digests) == 2 * 15
        assert len(set(digests)) == 1


def test_worlds_of_one_to_five_have_the_same_mean_if_one_rank_has_most_shards():
    """One rank contributes several blocks, and the others one each."""
    with Crew(5, "tree_means", 5, 13, 1009, False, True) as crew:
        digests = [digest for each in crew.hear_all() for digest in each]
        assert len(digests) == 2 * 15
        assert len(set(digests)) == 1
