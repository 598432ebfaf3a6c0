"""The documentation site: every page has a reader's path, and its reference is what the code has.

`make docs` builds it and checks every link; here is what a program can hold in a second.
"""

import ast
import re
import sys
import textwrap

import pytest
import yaml
from style_sources import ROOT, short, tree_of

from elastane.cli.main import VERBS
from elastane.options.table import TABLE

sys.path.insert(0, str(ROOT / "manual"))
try:
    import pages
    from commands import command_of
finally:
    sys.path.pop(0)

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Pages that list their folder: a link to the list counts as one to each of its pages.
LISTS = {"decisions/README.md"}
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")
_FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"( *)([-*+]|\d+[.)]) ")


class _Loader(yaml.SafeLoader):
    """Reads a file whose tags name objects of Python, without making them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SITE = yaml.load((ROOT / "manual" / "mkdocs.yml").read_text(), _Loader)


def navigated(nav):
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav)
            for page in navigated(part)]  # fmt: skip


def linked(page):
    """The pages of docs/ that a page links, by their names there."""
    targets = [(page.parent / target).resolve() for target in _LINK.findall(page.read_text())]
    return {str(path.relative_to(DOCS)) for path in targets if path.is_relative_to(DOCS)}


def blocks(page, language):
    found = _FENCED.findall(page.read_text("utf-8"))
    return [textwrap.dedent(text) for _, of, text in found if of == language]


def test_the_navigation_has_every_page_once():
    shown = navigated(SITE["nav"])
    assert len(shown) == len(set(shown))
    pages_of_docs = {str(page.relative_to(DOCS)) for page in PAGES}
    decided = {name for name in pages_of_docs if name.startswith("decisions/")}
    assert pages_of_docs - decided == {name for name in shown if (DOCS / name).is_file()}
    assert "decisions" in shown, "the hook fills it from the list of decisions"
    assert linked(DOCS / "decisions" / "README.md") | LISTS >= decided


def test_every_page_has_a_path_for_its_readers():
    """A reader who begins at the front page reaches each page by a list, not by luck."""
    reached = linked(DOCS / "index.md") | {"index.md"}
    for name in reached & LISTS:
        reached |= linked(DOCS / name)
    assert not {str(page.relative_to(DOCS)) for page in PAGES} - reached


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_lists_read_the_same_on_the_site_as_in_the_repository(page):
    """The site's Markdown wants a blank line before a list, and four spaces for one within."""
    before = ""
    for line in re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S).splitlines():
        if found := _ITEM.match(line):
            assert len(found[1]) % 4 == 0, f"not nested by four spaces: {line}"
            continues = not before.strip() or _ITEM.match(before) or before[0] in " #"
            assert continues, f"no blank line before: {line}"
        before = line


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=short)
def test_python_that_a_page_shows_is_python(page):
    for text in blocks(page, "python"):
        compile(text, short(page), "exec")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=short)
def test_what_a_page_imports_is_in_the_reference(page):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or not _is_ours(node.module):
                continue
            for name in {alias.name for alias in node.names}:
                inner = f"{node.module}.{name}"
                known = pages.exported(node.module) if node.module in pages.MODULES else []
                assert name in known or inner in pages.MODULES, f"{inner} is in no page of the API"


def _is_ours(module):
    # elastane.elastic has torch's names, and docs/torchrun-reference.md lists them.
    return (
        bool(module) and f"{module}.".startswith("elastane.") and "elastane.elastic" not in module
    )


def test_the_reference_has_every_public_name_of_the_package():
    import elastane

    inner = {name.removeprefix("elastane.") for name in pages.MODULES}
    assert set(elastane.__all__) <= {*pages.exported("elastane"), *inner, "__version__"}


@pytest.mark.parametrize("module", [name for name, shown in pages.MODULES.items() if shown])
def test_a_name_that_the_reference_chooses_is_there(module):
    tree = tree_of(pages.source_of(module))
    assert set(pages.MODULES[module]) <= {getattr(node, "name", "") for node in tree.body}


def test_the_page_of_run_has_every_option_with_its_variable():
    text = pages.pages()["reference/commands/run.md"]
    for option in TABLE:
        found = re.search(
            rf"^`[^`]*--{option.name}\b[^`]*`{{ #run-[\w-]+ }}\n:   (.*)$", text, re.M
        )
        assert found, option.name
        assert option.env in found[1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_of_a_command_has_what_its_help_prints(verb):
    command = command_of(verb)
    text = pages.pages()[pages.page_of(command)]
    for one in (command, *command.acts):
        assert one.usage in text
        for _, arguments in one.groups:
            assert all(f"`{argument.written}`{{ #" in text for argument in arguments)
    anchors = re.findall(r"\{ #(\S+) \}", text)
    assert len(anchors) == len(set(anchors))
