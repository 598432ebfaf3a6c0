"""The shape of code: the length of functions, the number of parameters, no sleeping tests."""

import ast
from collections import Counter

from style_sources import (
    functions_of,
    nodes_of,
    offenders,
    package_files,
    python_files,
    short,
    tree_of,
)

FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6


def test_a_function_is_at_most_60_lines():
    def longer(path):
        lines = [(f.name, f.end_lineno - f.lineno + 1) for f in functions_of(path)]
        return [each for each in lines if each[1] > FUNCTION_LINES_MAX]

    assert not offenders(python_files(), longer)


def test_a_function_has_at_most_6_parameters_all_annotated():
    def wrong(path):
        # There the signatures are torch's.
        is_torchs = short(path).startswith("src/elastane/elastic/")
        lines = path.read_text().splitlines()
        for node in functions_of(path):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            args = [arg for arg in args if arg.arg not in ("self", "cls")]
            is_told = "noqa: PLR0913 - " in lines[node.lineno - 1]  # with its reason
            if len(args) > PARAMETERS_MAX and not is_torchs and not is_told:
                yield f"{node.name} takes {len(args)}"
            yield from (f"{node.name}({arg.arg})" for arg in args if arg.annotation is None)

    assert not offenders(package_files(), lambda path: [*wrong(path)])


def test_no_class_name_stands_for_two_things():
    names = Counter(
        node.name
        for path in package_files()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def _is_sleep(node):
    """A call of some sleep(), but for sleep(0), which only lets others run."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_call or node.func.attr != "sleep":
        return False
    return not (node.args and getattr(node.args[0], "value", None) == 0)


def _claims(node):
    """Whether a function asserts by itself; one that does not may play a slow peer."""
    inner = [child for child in ast.walk(node) if child is not node]
    return node.name.startswith("test_") or any(isinstance(child, ast.Assert) for child in inner)


def _sleeps(node, allowed=False):
    """Lines of functions that claim something and sleep outside of a loop."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        allowed = not _claims(node)
    allowed = allowed or isinstance(node, (ast.While, ast.For, ast.AsyncFor, ast.Lambda))
    if _is_sleep(node) and not allowed:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _sleeps(child, allowed)


TESTS = [path for path in python_files() if path.name.startswith("test_")]


def test_each_test_file_has_a_name_of_its_own():
    """pytest imports them all into one process, by their bare names."""
    names = Counter(path.name for path in TESTS if path.name not in {"conftest.py", "__init__.py"})
    assert not {name: count for name, count in names.items() if count > 1}


def test_no_test_sleeps_to_wait():
    """A loop that polls until a deadline may pause between its looks.

    Where time itself must pass, for a lease to run out say, the line says so in a comment.
    """

    def sleeps(path):
        source = path.read_text("utf-8").splitlines()
        return [line for line in _sleeps(tree_of(path)) if "#" not in source[line - 1]]

    assert not offenders(TESTS, sleeps), "wait for the thing itself"
