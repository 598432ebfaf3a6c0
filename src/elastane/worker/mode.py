"""How a worker computes a step: what surrounds its micro-batches.

`Mode` is the ordinary way: it computes a rank's micro-batches as they are dealt, and leaves
gradients to DDP or to the body. `worker.deterministic` has the other way. It does not know
membership.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.elastic import ElasticGroup
from elastane.data.feed import Portion
from elastane.data.position import DataPosition


class Mode:
    """The way one worker computes: `apply` once, `open` for each loop, `begin` for each step."""

    is_deterministic = False

    def __init__(self) -> None:
        self.group = ElasticGroup()
        self.tracked = RegisteredObjects()

    def apply(self, group: ElasticGroup, tracked: RegisteredObjects) -> None:
        """Begin with this group and the registered objects."""
        self.group, self.tracked = group, tracked

    def close(self) -> None:
        """Leave nothing behind in this process."""

    def open(self, cursor: DataPosition, accumulate: int) -> None:
        """Deal each step in `accumulate` micro-batches from here on."""
        cursor.accumulate(accumulate)

    def insist_on_world(self, size: int) -> None:
        """Refuse a world size that this mode cannot compute in."""

    def begin(self, step: int) -> None:
        """Begin a step, or retry it."""

    def portions(self, dealt: Sequence[Portion]) -> Iterator[Portion]:
        """Yield this rank's micro-batches; work between two of them happens on the way."""
        yield from dealt

    def leave(self) -> None:
        """Discard an unfinished micro-batch: the body has ended."""

    def insist_on_all(self) -> None:
        """Refuse an optimizer step that comes too early."""

    def settings(self) -> dict[str, Any]:
        """Return what results depend on, besides the script and its data."""
        return {
            "deterministic": self.is_deterministic,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": _processor(),
        }


def _processor() -> str:
    """Return the kind of processor, by which torch chooses its kernels."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
