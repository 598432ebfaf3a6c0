"""A job as what a Checkpointer saves and restores: its tracked objects, and its place in the data.

A worker that waits for a place restores nothing: the members give it their state. What was
restored is what this member holds, as if it had made those steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch

from elastane.checkpoint.members import Alone, Members, OfGroup
from elastane.checkpoint.registered import Tracked
from elastane.checkpoint.state_source import insist_on_names
from elastane.data.cursor import DataPosition
from elastane.errors import PeerLostError
from elastane.worker import sharding
from elastane.worker.healing import Health
from elastane.worker.world import Worlds

if TYPE_CHECKING:
    from elastane.checkpoint.checkpointer import Checkpointer

# Beside the user's own names, which are of keyword arguments and have no dot.
DATA = "elastane.data"


class SavedJob:
    """The subject of one job, whether or not it has a Checkpointer."""

    def __init__(self, worlds: Worlds, tracked: Tracked, health: Health) -> None:
        self._worlds, self._tracked, self._health = worlds, tracked, health
        self._cursor: DataPosition | None = None
        self._place: dict[str, Any] = {}  # of a state that was restored before there is a cursor
        self._settles: list[Callable[[], None]] = []
        self._checkpointer: Checkpointer | None = None

    def saved_by(self, checkpointer: Checkpointer) -> Self:
        """Take note of who saves this."""
        self._checkpointer = checkpointer
        return self

    @property
    def restored_by(self) -> str:
        """What has brought back the tracked objects, or found that there was nothing; or ""."""
        return "checkpointer.restore(job)" if self._checkpointer is not None else ""

    def opened(self, cursor: DataPosition) -> None:
        """Take the job's place in the data from now on, and go to where it was restored."""
        self._cursor = cursor
        if self._place:
            cursor.load_state_dict(self._place)

    def settle(self) -> None:
        """Wait until what is tracked may be changed by something else than a step's body."""
        for settle in self._settles:
            settle()

    def save_before_stop(self) -> None:
        """Save where all workers are going to be stopped, if there is a Checkpointer."""
        if self._checkpointer is not None and self._cursor is not None:
            self._checkpointer.save_before_stop(self._cursor.next_step)

    @property
    def is_new(self) -> bool:
        """Whether nobody else gives this worker a state."""
        return not self._worlds.came_later

    @property
    def why(self) -> str:
        """Why all workers begin from what was saved; "" where nothing says so."""
        return sharding.why_unhealed(self._tracked, self._worlds.mesh)

    @property
    def fence(self) -> tuple[int, int]:
        """That of the world in hand."""
        return self._worlds.fence.round, self._worlds.fence.attempt

    def members(self) -> Members:
        """Return the members of the world in hand."""
        return OfGroup(self._worlds.group) if self._worlds.group.size() > 1 else Alone()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those that are tracked."""
        return self._tracked.optimizers

    def buffers(self) -> list[torch.Tensor]:
        """Return those of the modules that are tracked."""
        return [buffer for module in self._tracked.modules for buffer in module.buffers()]

    def before_change(self, settle: Callable[[], None]) -> None:
        """Call it before an optimizer's step, and before another member's state comes."""
        self._settles.append(settle)

    def is_lost(self, error: Exception) -> bool:
        """Whether a member was lost, which the job's next step recovers from."""
        return isinstance(error, PeerLostError) or self._worlds.group.failed

    def prepare(self) -> None:
        """Make the state of sharded optimizers."""
        self._tracked.prepare()

    def unprepare(self) -> None:
        """Have them without a state again."""
        self._tracked.unprepare()

    def state(self) -> dict[str, Any]:
        """Return what is to be saved."""
        place = self._cursor.state_dict() if self._cursor is not None else self._place
        return {**self._tracked.state(), DATA: place}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that was saved, before the first step."""
        insist_on_names(state, self.state())
        self._tracked.load({name: held for name, held in state.items() if name != DATA})
        self._place = dict(state[DATA])
        self._health.whole()
