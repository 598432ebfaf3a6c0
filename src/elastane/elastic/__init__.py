"""The API of torch.distributed.elastic, module for module: a thin face over our parts.

    import elastane.elastic as elastic
    agent = elastic.agent.server.LocalElasticAgent(spec)

Modules are imported when their name is first used. Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = frozenset(
    (
        *("agent", "control_plane", "events", "launcher", "metrics"),
        *("multiprocessing", "rendezvous", "timer", "utils"),
    )
)
# Samples take these from here as well; they are torch.distributed's.
_TORCHS = frozenset(("init_process_group", "destroy_process_group"))


def __getattr__(name: str) -> Any:
    """Import a module of this package, or take a function of torch.distributed, by its name."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _TORCHS:
        return getattr(importlib.import_module("torch.distributed"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_TORCHS})
