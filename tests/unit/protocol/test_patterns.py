"""The class of each failure of a labelled corpus, and what a log may say without being a cause."""

from pathlib import Path

import pytest

from elastane.protocol.diagnosis import headline
from elastane.protocol.patterns import PATTERNS, class_of
from elastane.protocol.verdicts import Outlook

CORPUS = Path(__file__).with_name("failures.txt")
PAGE = Path(__file__).parents[3] / "docs" / "failure-classes.md"


def failures():
    """Return the class, the end and the output of each failure of the corpus."""
    blocks = CORPUS.read_text().split("\n== ")[1:]
    found = [block.partition("\n") for block in blocks]
    return [(*head.split(" | "), output) for head, _, output in found]


@pytest.mark.parametrize(("kind", "end", "output"), failures())
def test_each_failure_of_the_corpus_has_its_class(kind, end, output):
    found = class_of((end, headline(output)), output.splitlines())
    assert found.kind == kind, found
    assert found.next_step and found.outlook in Outlook


def test_each_pattern_of_the_table_has_a_failure_in_the_corpus():
    assert {one.kind for one in PATTERNS} <= {kind for kind, _, _ in failures()}


def test_the_page_has_each_class_with_its_outlook():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {row.split("`")[1]: row.split("`")[-2] for row in rows}
    assert {one.kind: one.outlook for one in PATTERNS}.items() <= told.items()


def test_the_group_of_a_sign_is_in_its_next_step():
    said = "ModuleNotFoundError: No module named 'apex'"
    assert class_of(("exit code 1", said), ()).next_step.startswith("install apex in")


def test_a_long_line_is_compared_up_to_a_bound_and_quoted_in_part():
    found = class_of(("SIGABRT", "x" * 5000 + "Xid"), ("NVRM: Xid (a): 79, " + "y" * 5000,))
    assert (found.kind, len(found.line)) == ("gpu-xid", 300)
