"""Elastic, fault-tolerant distributed training for PyTorch.

Names resolve when they are used, so that `import elastane` costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastane import errors
    from elastane.functions.launch import launch
    from elastane.job.drain import should_checkpoint
    from elastane.job.record import record

__version__ = "0.1.0"
__all__ = ["__version__", "errors", "launch", "record", "should_checkpoint"]

# Public name: the module it comes from; itself, where it is a module.
_HOMES = {
    "errors": "elastane.errors",
    "launch": "elastane.functions.launch",
    "record": "elastane.job.record",
    "should_checkpoint": "elastane.job.drain",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastane' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted(__all__)
