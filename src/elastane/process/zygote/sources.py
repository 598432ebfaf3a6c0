"""Finds variables that a script changes and that torch reads at import, in the script's source.

Pure, on the text alone: nothing of the script is run. It finds assignments at the top level of the
script, before its first import of torch. Changes by other modules are found when torch is imported
(`early`). A source that does not parse has no findings: Python itself reports the error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from elastane.process.zygote.fitness import is_read_at_import

_WORDS = (b"environ", b"putenv")
_METHODS = frozenset({"setdefault", "update", "pop", "putenv", "unsetenv"})
# An assignment's value: a text, None for a deletion, or a value that is not known.
_UNKNOWN = object()


def sets_too_late(source: bytes, env: Mapping[str, str]) -> str:
    """Return the first variable that the script changes and torch reads at import, or ""."""
    if not any(word in source for word in _WORDS):
        return ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in _until_torch(tree.body):
        for name, value in _changes(node, env):
            if is_read_at_import(name) and env.get(name) != value:
                return f"the script sets {name} in line {node.lineno}, before it imports torch"
    return ""


def _until_torch(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the simple statements at the top level, up to the first import of torch."""
    for node in _simple(body):
        if _imports_torch(node):
            return
        yield node


def _simple(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not hasattr(node, "body"):
            yield node
            continue
        yield from _simple(node.body)
        for handler in getattr(node, "handlers", ()):
            yield from _simple(handler.body)
        yield from _simple(getattr(node, "orelse", []))
        yield from _simple(getattr(node, "finalbody", []))


def _imports_torch(node: ast.stmt) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    return any(name.partition(".")[0] == "torch" for name in names)


def _changes(node: ast.stmt, env: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the variables that a statement changes, with their values."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield _text(target.slice), _value(value)
        case ast.Delete(targets=targets):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield _text(target.slice), None
        case ast.AugAssign(target=target, value=ast.Dict() as value) if _is_environ(target):
            yield from _items(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute() as func) as call):
            if func.attr in _METHODS and (_is_environ(func.value) or func.attr.endswith("env")):
                yield from _called(func.attr, call, env)


def _called(method: str, call: ast.Call, env: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the changes by a call of a method of os.environ, or of os.putenv."""
    if method == "update":
        for keyword in call.keywords:
            yield keyword.arg or "", _value(keyword.value)
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                yield from _items(argument)
        return
    name = _text(call.args[0]) if call.args else ""
    if method in ("pop", "unsetenv"):
        yield name, None
    elif len(call.args) > 1 and not (method == "setdefault" and name in env):
        yield name, _value(call.args[1])


def _items(node: ast.Dict) -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        yield _text(key), _value(value)


def _is_environ(node: ast.expr) -> bool:
    """Return whether an expression is `os.environ`, under any name of os, or `environ`."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return bool(name == "environ")


def _text(node: ast.expr | None) -> str:
    """Return the text of a literal; empty if it is none, as for a computed name."""
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) else ""


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else _UNKNOWN
