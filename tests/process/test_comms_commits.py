"""Members that made different collectives since the last commit do not commit the step."""

import pytest
from comms_crew import Crew

COUNTED = "rank 0 made 1 all-reduce since the last commit, and rank 1 2 all-reduces"


@pytest.mark.parametrize("odd", ["none", "stands", "passed"])
def test_members_whose_collectives_differ_all_hear_of_both_sides(odd):
    with Crew(3, "commits_with", odd) as crew:
        crew.hear_all()
        if odd == "stands":
            assert crew.is_silent(0, 0.2), "rank 1 stands in its surplus collective"
            crew.say_all()
            said = crew.hear_all()
            assert "committed" not in said
        else:
            said = crew.hear_all()
            crew.say_all()
        met = crew.hear_all()
    if odd == "none":
        assert (said, met) == (["committed"] * 3, ["met"] * 3)
    else:
        assert all(COUNTED in each for each in met), met
        assert odd == "stands" or all(COUNTED in each for each in said), said
