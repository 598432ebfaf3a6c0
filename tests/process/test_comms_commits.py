"""Members that made different collectives since the last commit do not commit the step."""

from pathlib import Path

import pytest
from comms_crew import Crew
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "odd_collectives.py"

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


def test_a_job_commits_no_step_in_which_ranks_made_different_collectives(tmp_path):
    options = {"nproc_per_node": 3, "max_restarts": 0, "tee": "3", "preload": PRELOAD_OPTIMIZER}
    with LocalCluster([str(SCRIPT)], folder=tmp_path, **options) as cluster:
        node = cluster.start("a")
        assert node.wait() == 1
        said = node.output
    assert said.count("committed 2") == 3 and "committed 3" not in said
    assert "rank 0 and rank 1 each made 1 all-reduce in one step, in another order" in said
    assert said.count("[job-collectives]") >= 3
