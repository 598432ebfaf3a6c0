"""The pages of transcripts are what the protocol does now."""

from pathlib import Path

import pytest

from simulation.transcript import Play, replayed

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_of_the_protocol_is_what_happens():
    page = PAGE.read_text("utf-8")
    assert replayed(page) == page, (
        "python -m simulation --transcript docs/protocol.md prints the new page"
    )


def test_the_page_has_twenty_six_situations():
    page = PAGE.read_text("utf-8")
    assert page.count("\n## ") == page.count("```transcript\n> job ") == 26


def test_a_page_without_its_output_gets_it():
    page = PAGE.read_text("utf-8")
    kept = [line for line in page.splitlines() if not line.startswith("    ")]
    assert replayed("\n".join(kept)) == page


@pytest.mark.parametrize(
    "command", ["run 3", "job nodes=2\nfly", "job nodes=2\nstore burns", "job nodes=1\ndie n0 here"]
)
def test_a_command_that_is_not_known_is_refused(command):
    play = Play()
    with pytest.raises(ValueError, match=r"job|expected|EffectGap"):
        for line in command.split("\n"):
            play.do(line)
