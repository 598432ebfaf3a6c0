"""What a field of the spec may be, by its path: for messages about values that it may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from elastane.kubernetes.model.spec import ElasticJobSpec


def choices(path: Sequence[str]) -> tuple[str, ...]:
    """Return the values that are valid at a path such as ("replicaSpecs", "Worker", ...).

    Empty where the field is no choice of words. Items of lists are not steps of the path.
    """
    info: Any = inspect.type_info(ElasticJobSpec)
    for step in path:
        fields = getattr(_plain(info), "fields", ())
        info = next((field.type for field in fields if field.encode_name == step), None)
    found = _plain(info)
    return tuple(map(str, found.values)) if isinstance(found, inspect.LiteralType) else ()


def _plain(info: Any) -> Any:
    """Return the type without its bounds, its None and its list."""
    while True:
        if isinstance(info, inspect.Metadata):
            info = info.type
        elif isinstance(info, inspect.UnionType):
            info = next(kind for kind in info.types if not isinstance(kind, inspect.NoneType))
        elif isinstance(info, inspect.VarTupleType):
            info = info.item_type
        else:
            return info
