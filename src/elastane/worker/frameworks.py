"""Frameworks that a script has imported, and that have to follow a change of its world.

Our module for a framework is imported only if the script has imported the framework. Fails as the
adoption does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

from elastane.synchrony.visible import VisibleWorld

# By the name that a script imports: our module, whose `adopt(name, world)` is called once.
_ADOPTERS = {
    "accelerate": "elastane.integrations.accelerate",
    "ignite.metrics": "elastane.integrations.ignite",
    "lightning.fabric": "elastane.integrations.fabric",
    "lightning.pytorch": "elastane.integrations.lightning",
    "lightning_fabric": "elastane.integrations.fabric",
    "pytorch_lightning": "elastane.integrations.lightning",
    "torchmetrics": "elastane.integrations.torchmetrics",
    "transformers.trainer": "elastane.integrations.transformers",
}

# These compute with rank and world size, so their programs always see the members that are left.
# An import does not show that a script uses them; `in_use(name)` of our module does. Each Trainer
# of Transformers uses Accelerate.
_FOLLOWING = ("accelerate", "lightning.pytorch", "pytorch_lightning")

# All workers take part in each of their saves, so that another one saves what a loss interrupts.
_SAVING_TOGETHER = ("lightning.pytorch", "pytorch_lightning")


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
        """Whether the script uses a framework that computes with rank and world size."""
        return self._uses_any(_FOLLOWING)

    @property
    def leave_loop(self) -> bool:
        """Whether the framework in use leaves the loop to the script, as Accelerate does.

        A Trainer of Transformers asks Accelerate for the size after each sum.
        """
        return "transformers.trainer" not in self._adopted and self._uses_any(("accelerate",))

    @property
    def save_together(self) -> bool:
        """Whether a framework makes all saves of the script, by all workers together."""
        return self._uses_any(_SAVING_TOGETHER)

    def _uses_any(self, names: Iterable[str]) -> bool:
        adopted = (name for name in names if name in self._adopted)
        return any(importlib.import_module(_ADOPTERS[name]).in_use(name) for name in adopted)
