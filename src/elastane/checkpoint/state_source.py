"""What a Checkpointer saves: the named objects of a script, or those of a job.

`Objects` is for scripts that hold their own loop; a job brings a subject of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastane.checkpoint.members import Members, of_process
from elastane.checkpoint.registered import Tracked, has_state
from elastane.errors import CheckpointError
from elastane.process import environment

# What a Checkpointer itself goes on from, beside the user's names.
CHECKPOINTER = "elastane.checkpointer"


class SavingWorld(Protocol):
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


class Subject(SavingWorld, Protocol):
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
        insist_on_mapping(objects)
        if CHECKPOINTER in objects:
            raise _unnamed(f"{CHECKPOINTER!r} is what the Checkpointer itself is saved as")
        for name, thing in objects.items():
            if not has_state(thing):
                raise _unnamed(
                    f"{name!r} is a {type(thing).__name__}, without state_dict() and"
                    " load_state_dict()"
                )
        self._tracked = Tracked()
        self._tracked.add({**objects, CHECKPOINTER: checkpointer})
        self._members = _of_world()
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


def insist_on_mapping(objects: object) -> None:
    """CheckpointError where this is no mapping of names to what is saved under them."""
    if not isinstance(objects, Mapping):
        raise _unnamed(f"a {type(objects).__name__} has no names for what is saved")
    for name in objects:
        if not isinstance(name, str):
            raise _unnamed(f"{name!r} is no name for what is saved")


def _unnamed(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        expected="a mapping of texts to models, optimizers and so on, or a job of elastane.init()",
        next_step='{"model": model, "optimizer": optimizer}',
        slug="checkpoint-state",
    )


def _of_world() -> Members:
    members = of_process()
    ranks = _number(environment.get("WORLD_SIZE"))
    if ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise CheckpointError(
            f"WORLD_SIZE is {ranks}, and there is no process group: each rank would save alone",
            expected="torch.distributed.init_process_group() before restore()",
            next_step="call it first; of a job of elastane.init(), restore(job)",
            slug="checkpoint-ranks",
        )
    return members


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
