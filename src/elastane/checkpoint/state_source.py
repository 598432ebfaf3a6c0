"""The source of the state that a Checkpointer saves: a script's named objects, or a job.

`ScriptObjects` is for scripts with their own loop; a job brings its own StateSource.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastane.checkpoint.members import Members, members_of_process
from elastane.checkpoint.registered import RegisteredObjects, has_state
from elastane.errors import CheckpointError
from elastane.process import environment

# The name of a Checkpointer's own state, besides the user's names.
CHECKPOINTER = "elastane.checkpointer"


class SavingWorld(Protocol):
    """The ranks that save together, and their fence."""

    def members(self) -> Members:
        """Return the ranks; all call the same methods in the same order."""

    @property
    def fence(self) -> tuple[int, int]:
        """Round and attempt."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose steps alone change parameters."""

    def buffers(self) -> list[torch.Tensor]:
        """Return the modules' buffers, which differ by rank; rank 0's are saved, as in DDP."""


class StateSource(SavingWorld, Protocol):
    """A state, and the ranks that save and restore it."""

    def state(self) -> dict[str, Any]:
        """Return the state to save, with live tensors."""

    def prepare(self) -> None:
        """Create state that must exist before it can be read into."""

    def unprepare(self) -> None:
        """Undo `prepare`, since nothing was read."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""

    @property
    def is_new(self) -> bool:
        """Whether it restores by itself; otherwise other members send it their state."""

    @property
    def why(self) -> str:
        """Why it is restored, for the event log; "" if unknown."""

    def is_lost(self, error: Exception) -> bool:
        """Whether an error is the loss of a rank from which the script itself recovers."""

    def before_change(self, finish: Callable[[], None]) -> None:
        """Call `finish` before the state changes outside of a step's body."""


class ScriptObjects:
    """The objects of a script that restores when it starts."""

    is_new = True
    why = ""

    def __init__(self, objects: Mapping[str, Any], checkpointer: Any) -> None:
        require_mapping(objects)
        if CHECKPOINTER in objects:
            raise _unnamed(f"{CHECKPOINTER!r} is the name of the Checkpointer's own state")
        for name, thing in objects.items():
            if not has_state(thing):
                raise _unnamed(
                    f"{name!r} is a {type(thing).__name__}, without state_dict() and"
                    " load_state_dict()"
                )
        self._registered = RegisteredObjects()
        self._registered.add({**objects, CHECKPOINTER: checkpointer})
        self._members = _of_world()
        self.fence = fence_of_process()  # Given by the launcher.

    def state(self) -> dict[str, Any]:
        """Return the objects' states by name."""
        return self._registered.state()

    def prepare(self) -> None:
        """Create the state of sharded optimizers."""
        self._registered.prepare()

    def unprepare(self) -> None:
        """Remove it again."""
        self._registered.unprepare()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load each object's state."""
        require_names(state, self._registered.state())
        self._registered.load(state)

    def members(self) -> Members:
        """Return all ranks of the default process group."""
        return self._members

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the named optimizers."""
        return self._registered.optimizers

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the named modules."""
        return [buffer for module in self._registered.modules for buffer in module.buffers()]

    def before_change(self, finish: Callable[[], None]) -> None:
        """Call it before each optimizer's step; version counters reveal other changes."""
        for optimizer in self._registered.optimizers:
            optimizer.register_step_pre_hook(lambda *_: finish())

    def is_lost(self, error: Exception) -> bool:
        """Return False: such a script ends, and is started again."""
        return False


def fence_of_process() -> tuple[int, int]:
    """Return round and attempt from the launcher; under torchrun the attempt counts restarts."""
    attempt = environment.get("ELASTANE_ATTEMPT") or environment.get("TORCHELASTIC_RESTART_COUNT")
    return _number(environment.get("ELASTANE_ROUND")), _number(attempt)


def require_mapping(objects: object) -> None:
    """Raise CheckpointError unless this is a mapping of names to objects."""
    if not isinstance(objects, Mapping):
        raise _unnamed(f"a {type(objects).__name__} does not name the objects to save")
    for name in objects:
        if not isinstance(name, str):
            raise _unnamed(f"{name!r} is no name of an object to save")


def _unnamed(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        expected="a mapping of texts to models, optimizers and so on, or a job of elastane.init()",
        next_step='{"model": model, "optimizer": optimizer}',
        slug="checkpoint-state",
    )


def _of_world() -> Members:
    members = members_of_process()
    ranks = _number(environment.get("WORLD_SIZE"))
    if ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise CheckpointError(
            f"WORLD_SIZE is {ranks}, and there is no process group: each rank would save alone",
            expected="torch.distributed.init_process_group() before restore()",
            next_step="call it first; of a job of elastane.init(), restore(job)",
            slug="checkpoint-ranks",
        )
    return members


def require_names(stored: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint holds other objects than the script names."""
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
