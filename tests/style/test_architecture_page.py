"""ARCHITECTURE.md: its files and functions are there, and its decisions have pages."""

import re

import pytest
from style_sources import ROOT, SRC, tree_of

PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
WORDS_MAX = 3_000
PLACES = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGE)
DECISIONS = ROOT / "docs" / "decisions"


def _is_defined(path, dotted):
    """Whether `Class`, `function` or `Class.method` stands in the file."""
    body = tree_of(path).body
    for name in dotted.split("."):
        found = [node for node in body if getattr(node, "name", "") == name]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def test_the_page_is_short_enough_to_be_read():
    assert len(PAGE.split()) <= WORDS_MAX


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(each) for each in PLACES])
def test_each_file_and_function_of_the_page_exists(file, name):
    assert (SRC / file).is_file(), file
    assert not name or _is_defined(SRC / file, name), f"{file} has no {name}"


def test_every_room_is_in_the_table_of_subjects():
    rooms = {path.name for path in SRC.iterdir() if (path / "__init__.py").is_file()}
    named = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("| room |") :]))
    assert rooms - {"examples"} <= named


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", *sorted(DECISIONS.glob("*.md"))])
def test_links_to_decisions_lead_to_pages(page):
    for link in re.findall(r"\]\((?!http)([^)#]+\.md)", page.read_text("utf-8")):
        assert (page.parent / link).is_file(), link


def test_every_decision_is_in_the_index():
    index = (DECISIONS / "README.md").read_text("utf-8")
    listed = set(re.findall(r"\(([\w-]+\.md)\)", index))
    assert listed == {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}


def test_code_that_the_decisions_name_exists():
    for page in DECISIONS.glob("*.md"):
        for file in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)", page.read_text("utf-8")):
            places = [ROOT / file, SRC / file]
            assert any(place.is_file() for place in places), f"{page.name}: {file}"
