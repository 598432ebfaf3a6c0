"""No circle of imports between modules, those under TYPE_CHECKING and in functions included."""

import ast
from graphlib import CycleError, TopologicalSorter

from style_sources import ROOT, SRC, nodes_of, package_files


def _name(path):
    root = SRC.parent if path.is_relative_to(SRC) else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SIMULATION = sorted((ROOT / "simulation").glob("*.py"))
MODULES = {_name(path): path for path in [*package_files(), *SIMULATION]}


def _imported(module):
    """The modules that a module names in its import statements."""
    for node in nodes_of(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: write the whole name of the module"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def _circle(imports):
    """One circle as `a -> b -> a`, "" where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def test_modules_import_each_other_in_one_direction_only():
    imports = {module: {*_imported(module)} & {*MODULES} - {module} for module in MODULES}
    assert not _circle(imports)


def test_a_circle_of_three_modules_is_named():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == "a -> b -> c -> a"
