"""Agents in the user's own process. Source: torch.distributed.elastic.agent."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `server` when its name is first used."""
    if name == "server":
        return importlib.import_module(f"{__name__}.server")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
