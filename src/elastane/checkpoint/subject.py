"""What a Checkpointer saves: the named objects of a script, or those of a job.

`Objects` is for scripts that hold their own loop; a job brings a subject of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from elastane.checkpoint.members import Members, of_process
from elastane.checkpoint.tracked import Tracked
from elastane.errors import CheckpointError
from elastane.runtime import environment

# What a Checkpointer itself goes on from, beside the user's names.
CHECKPOINTER = "elastane.checkpointer"


class World(Protocol):
    """The ranks that save together, and when they are."""

    def members(self) -> Members:
        """Return the ranks; all call the same in the same order."""

    @property
    def fence(self) -> tuple[int, int]:
        """Round and attempt."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those in whose steps alone parameters change."""

    def buffers(self) -> list[torch.Tensor]:
        """Return the modules' buffers: each rank's differ, and rank 0's are right, as in DDP."""


class Subject(World, Protocol):
    """A state, and the world that it is saved and restored in."""

    def state(self) -> dict[str, Any]:
        """Return what is to be saved; tensors are those that live."""

    def prepare(self) -> None:
        """Make what a state can be read into, where it has to be there before."""

    def unprepare(self) -> None:
        """Undo that: nothing was read."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that was saved."""

    @property
    def is_new(self) -> bool:
        """Whether it is to restore by itself; else others give it their state."""

    @property
    def why(self) -> str:
        """Why it is restored at all, for those who read the event log; "" where nobody asks."""

    def is_lost(self, error: Exception) -> bool:
        """Whether an error is the loss of a rank, that the script itself recovers from."""

    def before_change(self, settle: Callable[[], None]) -> None:
        """Have this called before anything of the state changes but in a step's body."""


class Objects:
    """The objects of a script that restores as it starts."""

    is_new = True
    why = ""

    def __init__(self, objects: Mapping[str, Any], checkpointer: Any) -> None:
        self._tracked = Tracked()
        self._tracked.add({**objects, CHECKPOINTER: checkpointer})
        self._members = of_process()
        self.fence = fence_of_process()  # what the launcher says

    def state(self) -> dict[str, Any]:
        """Return the objects' states by name."""
        return self._tracked.state()

    def prepare(self) -> None:
        """Make the state of sharded optimizers."""
        self._tracked.prepare()

    def unprepare(self) -> None:
        """Have them without a state again."""
        self._tracked.unprepare()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load each object's state."""
        insist_on_names(state, self._tracked.state())
        self._tracked.load(state)

    def members(self) -> Members:
        """Return all ranks of the default process group."""
        return self._members

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those that were named."""
        return self._tracked.optimizers

    def buffers(self) -> list[torch.Tensor]:
        """Return those of the modules that were named."""
        return [buffer for module in self._tracked.modules for buffer in module.buffers()]

    def before_change(self, settle: Callable[[], None]) -> None:
        """Call it before each optimizer's step; what else changes state shows by its version."""
        for optimizer in self._tracked.optimizers:
            optimizer.register_step_pre_hook(lambda *_: settle())

    def is_lost(self, error: Exception) -> bool:
        """Never: such a script ends, and is started anew."""
        return False


def fence_of_process() -> tuple[int, int]:
    """Return round and attempt as the launcher says them; of torchrun the restarts."""
    attempt = environment.get("ELASTANE_ATTEMPT") or environment.get("TORCHELASTIC_RESTART_COUNT")
    return _number(environment.get("ELASTANE_ROUND")), _number(attempt)


def insist_on_names(stored: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """CheckpointError where a checkpoint holds other objects than the script names."""
    if set(stored) == set(named):
        return
    missing, odd = sorted(set(named) - set(stored)), sorted(set(stored) - set(named))
    found = [f"no {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(odd)}"] * bool(odd)
    raise CheckpointError(
        f"the checkpoint holds {' and '.join(found)}",
        expected=f"what the script names: {', '.join(sorted(named))}",
        next_step="name the same objects, or read it yourself by elastane.load_checkpoint(where)",
        slug="checkpoint-state",
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
