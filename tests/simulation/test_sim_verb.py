"""`python -m simulation`: what it plays, prints and returns."""

import pytest

from simulation import Violation
from simulation.__main__ import main
from simulation.faults import Faults


def test_seeds_that_hold_are_counted_with_their_rate(capsys):
    assert main(["--seeds", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("10 histories held, in ") and " a second): " in out


def test_a_story_is_printed_for_passing_histories_too(capsys):
    assert main(["--seed", "3", "--mode", "store", "--story"]) == 0
    out = capsys.readouterr().out
    assert "round-settled" in out and "Result(seed=3, mode='store'" in out


def test_a_failing_seed_is_shrunk_and_its_command_replays_it(capsys, monkeypatch):
    def breaks(self):
        raise Violation("a worker of n0 died")

    monkeypatch.setattr(Faults, "_workers_crash", breaks)
    assert main(["--seeds", "50", "--mode", "store"]) == 1
    out = capsys.readouterr().out
    assert "looking for less that fails as well" in out
    command = out.splitlines()[-1].removeprefix("replay: python -m simulation ")
    assert main(command.split()) == 1
    again = capsys.readouterr().out
    assert again.splitlines()[-2:] == out.splitlines()[-2:]


def test_several_processes_play_the_same_histories(capsys):
    counts = []
    for jobs in ("1", "2"):
        assert main(["--seeds", "30", "--mode", "endpoint", "--jobs", jobs]) == 0
        counts.append(capsys.readouterr().out.split("): ")[1])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "words",
    [["--seeds", "0"], ["--span", "-1"], ["--without", "x"], ["--transcript", "/nowhere.md"]],
)
def test_what_cannot_be_played_is_an_error_of_usage(words, capsys):
    assert main([*words]) == 2
    assert "[usage]" in capsys.readouterr().err
