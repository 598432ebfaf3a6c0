"""A job as the state source of a Checkpointer: registered objects, and the position in the data.

A standby restores nothing, since the members give it their state. A restored state counts as if
this member had made those steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from elastane.checkpoint.members import GroupMembers, Members, SingleProcess
from elastane.checkpoint.registered import RegisteredObjects
from elastane.checkpoint.state_source import require_names
from elastane.comms.elastic import ElasticGroup
from elastane.data.position import JobPosition
from elastane.errors import PeerLostError
from elastane.worker import shard_support
from elastane.worker.healing import Health
from elastane.worker.world import Worlds

if TYPE_CHECKING:
    from elastane.checkpoint.checkpointer import Checkpointer

# Cannot clash with the user's names, which are keyword arguments and have no dot.
DATA = "elastane.data"


class _JobMembers(GroupMembers):
    """The members of a world, who meet only where all have made the same collectives."""

    def __init__(self, group: ElasticGroup) -> None:
        super().__init__(group)
        self._pairing = group.pairing

    def _numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        self._pairing.insist()
        return super()._numbers(numbers)


class SavedJob:
    """The state source of one job, with or without a Checkpointer."""

    def __init__(self, worlds: Worlds, tracked: RegisteredObjects, health: Health) -> None:
        self._worlds = worlds
        self._tracked = tracked
        self._health = health
        self._cursor: JobPosition | None = None
        self._place: dict[str, Any] = {}  # restored before there was a cursor
        self._waits: list[Callable[[], None]] = []
        self._checkpointer: Checkpointer | None = None

    def saved_by(self, checkpointer: Checkpointer) -> Self:
        """Record which Checkpointer saves this job."""
        self._checkpointer = checkpointer
        return self

    @property
    def restored_by(self) -> str:
        """The call that restored the registered objects, or found nothing to restore; or ""."""
        return "checkpointer.restore(job)" if self._checkpointer is not None else ""

    def opened(self, cursor: JobPosition) -> None:
        """Read and write the position through `cursor`, and move it to the restored one."""
        self._cursor = cursor
        if self._place:
            cursor.load_state_dict(self._place)

    def settle(self) -> None:
        """Wait until registered objects may be changed outside of a step's body."""
        for settle in self._waits:
            settle()

    def save_before_stop(self) -> None:
        """Save before all workers are stopped, if there is a Checkpointer."""
        if self._checkpointer is not None and self._cursor is not None:
            self._checkpointer.save_before_stop(self._cursor.next_step)

    @property
    def is_new(self) -> bool:
        """Whether this worker restores its state: no member gives it one."""
        return not self._worlds.came_later

    @property
    def why(self) -> str:
        """Why all workers restart from a checkpoint after a loss; "" if they recover in place."""
        return shard_support.why_unhealed(self._tracked, self._worlds.mesh)

    @property
    def fence(self) -> tuple[int, int]:
        """The fence of the current world."""
        return self._worlds.fence.round, self._worlds.fence.attempt

    def members(self) -> Members:
        """Return the members of the current world."""
        if self._worlds.group.size() > 1:
            return _JobMembers(self._worlds.group)
        return SingleProcess()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the registered optimizers."""
        return self._tracked.optimizers

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the registered modules."""
        return [buffer for module in self._tracked.modules for buffer in module.buffers()]

    def before_change(self, settle: Callable[[], None]) -> None:
        """Register a call to make before an optimizer's step, and before a peer's state arrives."""
        self._waits.append(settle)

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means a lost peer, from which the job's next step recovers."""
        return isinstance(error, PeerLostError) or self._worlds.group.failed

    def prepare(self) -> None:
        """Create the state of sharded optimizers."""
        self._tracked.prepare()

    def unprepare(self) -> None:
        """Remove the state of sharded optimizers again."""
        self._tracked.unprepare()

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        place = self._cursor.state_dict() if self._cursor is not None else self._place
        return {**self._tracked.state(), DATA: place}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, before the first step."""
        require_names(state, self.state())
        self._tracked.load({name: held for name, held in state.items() if name != DATA})
        self._place = dict(state[DATA])
        self._health.whole()
