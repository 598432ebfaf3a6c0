"""docs/errors.md has a section for every slug that the code can print, and for no other."""

import ast
import re
from functools import cache

import pytest
from style_sources import ROOT, functions_of, nodes_of, package_files, short

PAGE = ROOT / "docs" / "errors.md"
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def _constants(node):
    """The strings an expression can be, through conditionals."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _constants(node.body)
        yield from _constants(node.orelse)


def _takers(path):
    """Functions of the module that take a slug, and at which place."""
    places = {}
    for node in functions_of(path):
        names = [arg.arg for arg in node.args.args if arg.arg != "self"]
        if "slug" in names:
            places[node.name] = names.index("slug")
    return places


def _slugs(path):
    takers = _takers(path)
    for node in nodes_of(path):
        if isinstance(node, ast.keyword) and node.arg == "slug":
            yield from _constants(node.value)
        elif isinstance(node, ast.Call):
            place = takers.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
            if place is not None and place < len(node.args):
                yield from _constants(node.args[place])
        elif isinstance(node, ast.Assign):
            names = [getattr(target, "id", getattr(target, "attr", "")) for target in node.targets]
            if any(name.lower().rpartition("_")[2] == "slug" for name in names):
                yield from _constants(node.value)


@cache
def _used():
    return {slug: short(path) for path in package_files() for slug in _slugs(path) if slug}


def _headings():
    return re.findall(r"^## (\S+)$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_every_slug_in_the_code_has_a_section():
    missing = {slug: path for slug, path in _used().items() if slug not in _headings()}
    assert not missing, f"docs/errors.md lacks {missing}"


def test_every_usage_error_says_what_to_do_next():
    silent = [
        f"{short(path)}:{node.lineno}"
        for path in package_files()
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "UsageError"
        and "next_step" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not silent, silent


def test_every_section_is_about_a_slug_in_the_code():
    assert not set(_headings()) - _used().keys()


def test_the_sections_are_in_order_and_without_doubles():
    assert _headings() == sorted(set(_headings()))


def test_slugs_are_words_with_dashes():
    assert all(_SLUG.fullmatch(slug) for slug in _used())


@pytest.mark.parametrize("slug", _headings())
def test_a_section_starts_with_what_to_do_and_then_says_what_happened(slug):
    body = PAGE.read_text("utf-8").split(f"\n## {slug}\n\n")[1].split("\n## ")[0]
    assert body.startswith("**Do.** "), slug
    assert body.count("\n\n**What happened.** ") == 1, slug


def test_the_list_by_subject_links_every_section_once():
    listed = re.findall(r"\[([a-z0-9-]+)\]\(#([a-z0-9-]+)\)", PAGE.read_text("utf-8"))
    assert [name for name, _ in listed] == [anchor for _, anchor in listed]
    assert sorted(name for name, _ in listed) == _headings()
