"""The API of torch.distributed.elastic, module for module, over elastane's own parts.

    import elastane.elastic as elastic
    agent = elastic.agent.server.LocalElasticAgent(spec)

Public names and signatures are those of torch 2.13. Code written for torch works after renaming the
import, including subclasses of agents and rendezvous handlers. Modules that work the same beside
elastane are torch's own objects under a second name; docs/decisions/elastic-api.md lists them. The
others say where their behaviour differs on purpose. A module is imported when its name is first
used, and importing this package imports no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_MODULES = frozenset(
    (
        *("agent", "control_plane", "events", "launcher", "metrics"),
        *("multiprocessing", "rendezvous", "timer", "utils"),
    )
)
# torch's samples also take these functions of torch.distributed from here.
_TORCHS = frozenset(("init_process_group", "destroy_process_group"))


def __getattr__(name: str) -> Any:
    """Import a module of this package, or return a function of torch.distributed."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _TORCHS:
        return getattr(importlib.import_module("torch.distributed"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_TORCHS})


def use_torchs(package: str, *names: str) -> None:
    """Give torch's modules of these names a second name below `package`, as `os.path` has."""
    torchs = package.replace(__name__, "torch.distributed.elastic")
    for name in names:
        _add_module(package, name, importlib.import_module(f"{torchs}.{name}"))


def use_itself(package: str, *names: str) -> None:
    """Make `package` importable under these names below it: one module here, several in torch."""
    for name in names:
        _add_module(package, name, sys.modules[package])


def _add_module(package: str, name: str, module: Any) -> None:
    sys.modules[f"{package}.{name}"] = module
    setattr(sys.modules[package], name, module)
