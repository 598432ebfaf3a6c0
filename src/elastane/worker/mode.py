"""How a worker computes a step: what surrounds its micro-batches, whatever the user writes inside.

`Mode` is the ordinary one, which computes a rank's micro-batches as they are dealt, and leaves
gradients to DDP or to the body. `job.deterministic` has the other. Must not know of membership.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elastane.checkpoint.registered import Tracked
from elastane.comms.elastic import ElasticGroup
from elastane.data.cursor import DataPosition
from elastane.data.feed import Portion


class Mode:
    """One job's on one worker: `apply` once, `open` for each loop, `begin` for each step."""

    is_deterministic = False

    def __init__(self) -> None:
        self.group = ElasticGroup()
        self.tracked = Tracked()

    def apply(self, group: ElasticGroup, tracked: Tracked) -> None:
        """Begin, in this group and with what is going to be tracked."""
        self.group, self.tracked = group, tracked

    def close(self) -> None:
        """Leave nothing in this process."""

    def open(self, cursor: DataPosition, accumulate: int) -> None:
        """Deal steps from here on, in so many micro-batches."""
        cursor.accumulate(accumulate)

    def insist_on_world(self, size: int) -> None:
        """Refuse a world of a size that this cannot be done in."""

    def begin(self, step: int) -> None:
        """Begin a step, or begin it again."""

    def portions(self, dealt: Sequence[Portion]) -> Iterator[Portion]:
        """Yield this rank's micro-batches; what is between two of them is done on the way."""
        yield from dealt

    def leave(self) -> None:
        """Forget the micro-batch in hand: the body has ended."""

    def insist_on_all(self) -> None:
        """Refuse an optimizer's step that would come too early."""

    def settings(self) -> dict[str, Any]:
        """What results depend on, besides the script and its data."""
        return {
            "deterministic": self.is_deterministic,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": _processor(),
        }


def _processor() -> str:
    """What kind of processor computes: torch chooses its kernels by it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
