"""Links between the documents lead to pages and headings that exist."""

import re

import pytest
from style_sources import ROOT, short

PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    if ".venv" not in path.parts
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([\w-]+))?\)")


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(plain)
    return found


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in _LINK.findall(text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{target} is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target or page.name} has no heading #{anchor}"
