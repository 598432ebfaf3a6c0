"""Lightning as the script has installed or imported it: it has two names.

Reading from here keeps Lightning's private names in view of one version check. Fails with
ConfigurationError for a version whose names were not checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from elastane.integrations.versions import require_known

# The versions whose private names are used here.
KNOWN = ("2.5.", "2.6.")
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _imported() -> str:
    """Return the name that the script has imported, or the first one that is installed."""
    for name in _NAMES:
        if name in sys.modules:
            return name
    for name in _NAMES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    return _NAMES[0]


NAME = _imported()
pytorch: Any = importlib.import_module(NAME)
require_known(NAME, str(pytorch.__version__), KNOWN)


def part(name: str) -> Any:
    """Return a module of the package, such as "strategies"."""
    return _module(f"{NAME}.{name}")


def weight_averaging() -> Any:
    """Return the callback that averages weights; None in versions without it."""
    return getattr(part("callbacks"), "WeightAveraging", None)


def fabric(name: str) -> Any:
    """Return a module of Lightning's Fabric, such as "plugins.environments"."""
    return _module(f"{_FABRICS[NAME]}.{name}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)
