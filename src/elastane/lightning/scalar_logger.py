"""`ScalarLogger`: scalars of a LightningModule, written once per step despite lost workers.

Lightning calls loggers on all workers. The others keep what rank 0 writes, so that the next rank 0
adds what a lost one had not written.
"""

from __future__ import annotations

import importlib
from typing import Any

from elastane.lightning import package
from elastane.worker.framework_scalars import FrameworkScalars

_Base: Any = package.part("loggers.logger").Logger


class ScalarLogger(_Base):  # type: ignore[misc]
    """A logger of Lightning whose sinks are those of `job.log_to`.

    Pass it to the Trainer: `Trainer(logger=ScalarLogger("scalars.jsonl"))`. Steps are counted as by
    Lightning's other loggers.
    """

    def __init__(self, *targets: Any) -> None:
        super().__init__()
        self._scalars = FrameworkScalars(targets)
        self._is_resumed = False

    @property
    def name(self) -> str:
        """The name of the logger."""
        return "elastane"

    @property
    def version(self) -> str:
        """Empty: the sinks know their runs."""
        return ""

    def log_graph(self, model: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note whether the training continues from a checkpoint; the Trainer calls it before."""
        trainer = getattr(model, "_trainer", None)
        self._is_resumed = getattr(trainer, "ckpt_path", None) is not None

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Leave out hyperparameters: the sinks take numbers by steps."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers; Lightning calls it on all workers."""
        self._scalars.log(metrics, step or 0, is_writer=_rank() == 0, is_resumed=self._is_resumed)

    def finalize(self, _status: str) -> None:
        """Close the sinks."""
        self._scalars.end()


def _rank() -> int:
    """Return the rank by which Lightning decides who logs; it follows the world."""
    rank_zero: Any = importlib.import_module("lightning_utilities.core.rank_zero")
    return int(rank_zero.rank_zero_only.rank)
