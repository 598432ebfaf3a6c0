"""Public names have a docstring with their contract, and every bound has its reason."""

import ast

import pytest
from style_sources import SRC, offenders, package_files, tree_of


def _public(path):
    """Public modules, classes, functions and methods, with their names."""
    tree = tree_of(path)
    yield "module", tree
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, kinds) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def _is_overload_or_override(node):
    names = {getattr(d, "id", getattr(d, "attr", "")) for d in getattr(node, "decorator_list", [])}
    return bool(names & {"overload", "override"})


def test_every_public_name_has_a_docstring():
    def bare(path):
        return [
            name
            for name, node in _public(path)
            if not ast.get_docstring(node) and not _is_overload_or_override(node)
        ]

    assert not offenders(package_files(), bare)


def test_every_duration_that_a_user_may_set_says_why():
    path = SRC / "protocol" / "limits.py"
    lines = path.read_text().splitlines()
    timing = next(node for node in tree_of(path).body if getattr(node, "name", "") == "Timing")
    fields = [node for node in timing.body if isinstance(node, ast.AnnAssign)]
    assert len(fields) >= 10
    for field in fields:
        name = field.target.id
        assert name.endswith("_s"), f"{name} has no unit"
        assert lines[field.lineno - 2].lstrip().startswith("#"), f"{name} does not say why"


@pytest.mark.parametrize("room", ["protocol", "snapshots"])
def test_every_fixed_bound_says_why(room):
    path = SRC / room / "limits.py"
    lines = path.read_text().splitlines()
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign):
            above = node.lineno - 2
            while lines[above] and not lines[above].startswith(("#", " ")):
                above -= 1
            assert lines[above].startswith("#"), f"line {node.lineno} does not say why"
