"""Frameworks that a script has imported, and that have to follow a change of its world.

Our module for a framework is imported only if the script has imported the framework. Fails as the
adoption does.
"""

from __future__ import annotations

import importlib
import sys

from elastane.synchrony.visible import VisibleWorld

# By the name that a script imports: our module, whose `adopt(name, world)` is called once.
_ADOPTERS = {
    "accelerate": "elastane.integrations.accelerate",
    "lightning.pytorch": "elastane.integrations.lightning",
    "pytorch_lightning": "elastane.integrations.lightning",
    "torchmetrics": "elastane.integrations.torchmetrics",
    "transformers.trainer": "elastane.integrations.transformers",
}

# An import does not show that a script uses these: the models of Transformers import Accelerate.
# Accelerate is in use once it has a state, and each Trainer makes one.
_STATEFUL = frozenset(("accelerate", "transformers.trainer"))

# All workers take part in each of their saves, so that another one saves what a loss interrupts.
_SAVING_TOGETHER = frozenset(("lightning.pytorch", "pytorch_lightning"))


class Frameworks:
    """Lets the frameworks of one process follow `world`, each once."""

    def __init__(self, world: VisibleWorld) -> None:
        self._world = world
        self._adopted: set[str] = set()

    def adopt(self) -> None:
        """Adopt those that were imported since the last call."""
        for name, module in _ADOPTERS.items():
            if name in sys.modules and name not in self._adopted:
                self._adopted.add(name)
                importlib.import_module(module).adopt(name, self._world)

    @property
    def in_use(self) -> bool:
        """Whether an adopted framework computes with rank and world size."""
        if self._adopted - _STATEFUL:
            return True
        if "accelerate" not in self._adopted:
            return False
        return bool(importlib.import_module(_ADOPTERS["accelerate"]).has_state("accelerate"))

    @property
    def save_together(self) -> bool:
        """Whether an adopted framework makes all saves of the script, by all workers together."""
        return bool(self._adopted & _SAVING_TOGETHER)
