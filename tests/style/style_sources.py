"""The project's own files, as the style tests read them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "elastane"
_FOLDERS = ("src", "tests", "bench", "examples", "deploy", "manual")
_TEXTS = (
    *("*.md", "docs/**/*.md", "examples/**/*.md", "pyproject.toml", "Makefile", ".ci/*", "LICENSE"),
    *("deploy/**/*.yaml", "deploy/**/*.tpl", "deploy/**/*.md", "deploy/Dockerfile*"),
    "examples/**/*.yaml",
)


def package_files():
    """Every module of the package."""
    return sorted(SRC.rglob("*.py"))


def python_files():
    """Every Python file of the project."""
    return sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))


def text_files():
    """Every file that a person may read."""
    texts = {path for pattern in _TEXTS for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(texts | set(python_files()) | set(SRC.rglob("*.md")))


@cache
def tree_of(path):
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def nodes_of(path):
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))


def short(path):
    return str(path.relative_to(ROOT))


@cache
def functions_of(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in nodes_of(path) if isinstance(node, kinds)]


def offenders(paths, rule):
    """What a rule says of each file that it says something of, by the file's name."""
    return {short(path): wrong for path in paths if (wrong := rule(path))}
