"""Accelerate under `elastane run --in-place`: its rank and world size follow the world.

It keeps both from its start, and programs compute with them: the Hugging Face Trainer multiplies
each loss by that size.
"""

from __future__ import annotations

import importlib
from typing import Any

from elastane.integrations.versions import require_known
from elastane.synchrony.visible import VisibleWorld

# The versions whose private names these are.
KNOWN = ("1.",)
_STATES = ("PartialState", "AcceleratorState")


def adopt(name: str, world: VisibleWorld) -> None:
    """Let Accelerate's state follow `world`; `name`: the package as the script has imported it.

    Raises ConfigurationError if the version is not known.
    """
    package: Any = importlib.import_module(name)
    require_known(name, str(package.__version__), KNOWN)
    states: Any = importlib.import_module(f"{name}.state")

    def follow() -> None:
        for state in _STATES:
            # All objects of the class share it; it is empty before the first.
            shared = getattr(states, state)._shared_state
            if "num_processes" in shared:
                shared.update(num_processes=world.size, process_index=world.rank)

    world.tell(follow)
    operations: Any = importlib.import_module(f"{name}.utils.operations")
    for gather in ("_gpu_gather", "_gpu_gather_object"):
        world.make_whole(operations, gather)
    # It divides a sum by the size.
    world.make_whole(package.Accelerator, "reduce")
    # The main process writes, and the others go on.
    world.make_whole(package.Accelerator, "save_state", waits=True)


def has_state(name: str) -> bool:
    """Whether the script has made an Accelerator or its state; `name`: the imported package."""
    states: Any = importlib.import_module(f"{name}.state")
    return bool(states.PartialState._shared_state)
