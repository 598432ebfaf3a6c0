"""One step of a job: a body that either happens on all members, or is dealt again.

Owns the edges of the body: what is saved before it, that no optimizer steps on a reduction that is
not complete, and whether the step has happened when the body ends, by itself or by an error. What
follows from that is `job`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastane.data.feed import Portion

if TYPE_CHECKING:
    from elastane.job.job import Job


class Step:
    """What `job.steps` yields; use it as `with step:` around one optimizer update.

    `number` counts from 0 over the whole job. `epoch` is that of its data.
    """

    def __init__(self, job: Job, number: int, portions: list[Portion]) -> None:
        self.number = number
        self.epoch = portions[0].share.epoch if portions else 0
        self.committed = False
        self.begun = False
        self.weight = portions[0].weight if portions else 1.0
        self._portions = portions
        self._job = job

    @property
    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches; each sets the weight that `backward` uses.

        With `deterministic=True` these are virtual shards, and gradients are reduced behind the
        last of them.
        """
        for portion in self._job.mode.portions(self._portions):
            self.weight = portion.weight
            yield portion.batch
            self._job.beat()

    @property
    def last_of_epoch(self) -> bool:
        """Whether the next step is of another epoch; the same on all workers."""
        return self._job.is_last_of_epoch(self.number)

    @property
    def samples(self) -> int:
        """How many samples of the step are this rank's."""
        return sum(portion.samples for portion in self._portions)

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        """Run `loss.backward()` with the weight of this rank's share.

        `loss` is the mean over the local batch: the gradient is then that of the mean over the
        step's samples, whatever the world is and however it was dealt.
        """
        (loss if self.weight == 1.0 else loss * self.weight).backward(**more)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Step:
        self.begun = True
        self._job.begin_step(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False
        return self._job.end_step(self, error if isinstance(error, Exception) else None)
