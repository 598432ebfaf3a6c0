"""Members that made different collectives since the last commit do not commit the step."""

from pathlib import Path

import pytest
from comms_crew import Crew
from jobs import PRELOAD_OPTIMIZER

from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "odd_collectives.py"

SURPLUS = SCRIPT.with_name("surplus_collective.py")
COUNTED = "rank 0 made 1 all-reduce since the last commit, and rank 1 2 all-reduces"


@pytest.mark.parametrize("odd", ["none", "stands", "passed"])
def test_differing_collectives_are_reported_with_both_sides_on_all_members(odd):
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


def test_a_round_begins_without_the_others_and_a_commit_waits_for_them():
    with Crew(3, "starts_alone") as crew:
        assert crew.hear(0) == "begun"
        assert crew.is_silent(0, 0.2), "it committed before the others had come"
        crew.say_all(1, 2)
        assert crew.hear_all(1, 2) == ["begun"] * 2
        assert crew.hear_all() == ["committed"] * 3


@pytest.mark.parametrize("odd", ["none", "no update", "no second update"])
def test_members_that_began_other_rounds_commit_where_their_collectives_are_the_same(odd):
    with Crew(3, "commits_early", odd) as crew:
        assert crew.hear_all() == ["done"] * 3
        assert crew.hear_all() == ["done"] * 3


@pytest.mark.parametrize("odd", ["before", "behind"])
def test_a_round_that_began_before_the_update_lets_no_other_collectives_pass(odd):
    with Crew(3, "commits_early", odd) as crew:
        said = crew.hear_all()
    both = "rank 0 made 3 all-reduces since the last commit, and rank 1 4 all-reduces"
    assert all(both in each for each in said), said


AHEAD = "rank 0 made 1 all-reduce since the last commit, and rank 1 "


@pytest.mark.parametrize("then", ["insist", "step", "stand"])
def test_members_ahead_of_a_surplus_collective_neither_commit_nor_save_again(then):
    with Crew(3, "goes_ahead", then) as crew:
        assert crew.hear_all(0, 2) == ["committed"] * 2
        if then == "stand":
            assert crew.is_silent(0, 0.2), "nobody joins its round"
            crew.say_all()
            crew.hear_all()
        else:
            said = crew.hear_all()
            crew.say_all()
            assert all(AHEAD + "2 all-reduces" in each for each in said), said
        met = crew.hear_all()
    surplus = "1 all-reduce, 1 barrier" if then == "stand" else "2 all-reduces"
    assert all(AHEAD + surplus in each for each in met), met


def test_a_job_commits_no_step_in_which_ranks_made_different_collectives(tmp_path):
    options = {"nproc_per_node": 3, "max_restarts": 0, "tee": "3", "preload": PRELOAD_OPTIMIZER}
    with LocalCluster([str(SCRIPT)], folder=tmp_path, **options) as cluster:
        node = cluster.start("a")
        assert node.wait() == 1
        said = node.output
    assert said.count("committed 2") == 3 and "committed 3" not in said
    assert "rank 0 and rank 1 each made 1 all-reduce in one step, in another order" in said
    assert said.count("[job-collectives]") >= 3


@pytest.mark.parametrize(
    "then",
    [
        "end",
        pytest.param("retry", marks=pytest.mark.soak),
        "save",
        pytest.param("verify", marks=pytest.mark.soak),
    ],
)
def test_no_end_retry_or_save_follows_a_commit_with_differing_collectives(tmp_path, then):
    options = {"nproc_per_node": 3, "max_restarts": 0, "tee": "3", "preload": PRELOAD_OPTIMIZER}
    words = [str(SURPLUS), then, str(tmp_path / "saves")]
    with LocalCluster(words, folder=tmp_path, **options) as cluster:
        node = cluster.start("a")
        assert node.wait() == 1
        said = node.output
    assert said.count("committed 3") == 2, "rank 1 alone does not commit"
    assert AHEAD + "1 all-reduce, 1 broadcast" in said
    assert f"went on to {then}" not in said
