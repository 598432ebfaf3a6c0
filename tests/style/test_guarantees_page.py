"""docs/guarantees.md names a test for each promise, and each of them exists."""

import ast
import re

import pytest
from style_sources import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
SEEN_TO_FAIL_MIN = 40


def rows():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "promise"]


@pytest.mark.parametrize("name", sorted({row[2].strip("`") for row in rows()}))
def test_the_test_of_a_promise_exists(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert function in {getattr(node, "name", "") for node in tree.body}


def test_each_row_has_a_promise_a_fault_a_test_and_whether_it_was_seen_to_fail():
    assert len(rows()) > 50
    for row in rows():
        assert len(row) == 4 and all(row), row
        assert row[0].endswith("."), row
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", row[2]), row


def test_most_promises_were_seen_to_fail():
    assert sum(row[3] != "-" for row in rows()) >= SEEN_TO_FAIL_MIN


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).resolve().is_file(), target
