"""Warn of a script that reads a variable of its place before `init()`.

The workers of the first world have RANK and the others from their start. A replacement has none
before `init()`, so such a script fails, or acts as rank 0, at the first replacement only. Reads
only source that the script's own frames have passed on the way to `init()`, and ignores what it
cannot read.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Iterator
from types import FrameType

from elastane.process.worker_environment import RANK_VARIABLES, SLUG

_log = logging.getLogger(__name__)


def warn_of_early_read(caller: FrameType | None) -> None:
    """Log the first such read of the script that calls `init()`; in the job's first rank 0 only."""
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if not is_first or os.environ.get("RANK") != "0":
        return
    path = str(getattr(sys.modules["__main__"], "__file__", ""))
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the file of `__main__` may be any name
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for line, name in sorted(_reads_before(tree, path, caller))[:1]:
        _log.warning(
            "%s:%d reads %s before elastane.init(): a worker that replaces another has no place"
            " there, and would fail. Next step: read job.rank and job.world_size, or read %s after"
            " init() [%s]",
            path,
            line,
            name,
            name,
            SLUG,
        )


def _reads_before(
    tree: ast.Module, path: str, frame: FrameType | None
) -> Iterator[tuple[int, str]]:
    """Yield line and variable of each read that lies before the calls that led to `init()`."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == path:
            for body in _bodies(tree, code.co_name, code.co_firstlineno):
                yield from _reads(body, frame.f_lineno)
        frame = frame.f_back


def _bodies(tree: ast.Module, name: str, first_line: int) -> Iterator[list[ast.stmt]]:
    """Yield the statements of a code object: the module's, or those of one function."""
    if name == "<module>":
        yield tree.body
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            lines = [node.lineno, *(each.lineno for each in node.decorator_list)]
            if first_line in lines:
                yield node.body


def _reads(body: list[ast.stmt], before_line: int) -> Iterator[tuple[int, str]]:
    waiting: list[ast.AST] = [*body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue  # It runs when it is called.
        waiting += ast.iter_child_nodes(node)
        name = _read(node)
        if name in RANK_VARIABLES and getattr(node, "lineno", before_line) < before_line:
            yield getattr(node, "lineno", 0), name


def _read(node: ast.AST) -> str:
    """Return the variable that an expression reads; empty for any other expression."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name)), ctx=ast.Load()):
            return name if _ends_in(value, "environ") else ""
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            got_from = getattr(func, "value", func) if _ends_in(func, "get") else func
            return name if _ends_in(got_from, "environ") or _ends_in(func, "getenv") else ""
    return ""


def _ends_in(node: ast.expr, name: str) -> bool:
    return (getattr(node, "attr", "") or getattr(node, "id", "")) == name
