"""Scalars that a Trainer or an Accelerator logs, written once per step despite lost workers.

The module of each framework offers its class: `elastane.transformers.ScalarCallback` and
`elastane.accelerate.scalar_tracker`. A framework is imported only when its class is requested.
"""

from __future__ import annotations

from typing import Any

from elastane.errors import ConfigurationError
from elastane.worker.framework_scalars import FrameworkScalars


def trainer_callback(base: Any) -> Any:
    """Return the callback class for a Trainer; `base`: TrainerCallback."""

    class ScalarCallback(base):  # type: ignore[misc]
        """A callback of the Hugging Face Trainer whose sinks are those of `job.log_to`.

        Pass it to the Trainer: `Trainer(callbacks=[ScalarCallback("scalars.jsonl")])`.
        """

        def __init__(self, *targets: Any) -> None:
            self._scalars = FrameworkScalars(targets)
            self._is_resumed = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Note whether the training continues from a checkpoint."""
            self._is_resumed = state.global_step > 0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Log the numbers; the Trainer calls it on all workers."""
            self._scalars.log(
                logs or {},
                state.global_step,
                is_writer=args.process_index == 0,
                is_resumed=self._is_resumed,
            )

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Close the sinks."""
            self._scalars.end()

    return ScalarCallback


def accelerate_tracker(package: Any, targets: tuple[Any, ...], *, is_resumed: bool) -> Any:
    """Return a tracker for `Accelerator(log_with=...)`; `package`: accelerate."""
    base: Any = package.tracking.GeneralTracker

    class ScalarTracker(base):  # type: ignore[misc]
        """A tracker of Accelerate whose sinks are those of `job.log_to`."""

        name = "elastane"
        requires_logging_directory = False
        # All workers keep what the main process writes.
        main_process_only = False

        def __init__(self) -> None:
            super().__init__()
            self._scalars = FrameworkScalars(targets)

        @property
        def tracker(self) -> Any:
            """The object that logs."""
            return self._scalars

        def store_init_configuration(self, _values: dict[str, Any]) -> None:
            """Leave out the configuration: the sinks take numbers by steps."""

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Log the numbers of a step; Accelerate calls it on all workers."""
            if step is None:
                raise ConfigurationError(
                    f"accelerator.log({sorted(values)}) without step=",
                    slug="job-log",
                    expected="the number of steps so far, by which a step is logged once",
                    next_step="accelerator.log(values, step=number)",
                )
            is_main = package.PartialState().is_main_process
            self._scalars.log(values, step, is_writer=is_main, is_resumed=is_resumed)

        def finish(self) -> None:
            """Close the sinks."""
            self._scalars.end()

    return ScalarTracker()
