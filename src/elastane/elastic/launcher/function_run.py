"""Runs a function in workers on this machine, as `multiprocessing.Std(entrypoint=...)`.

Owns only the parameters: elastic_launch runs the job. ChildFailedError if the function failed more
often than `max_restarts`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastane.elastic.launcher.api import LaunchConfig, elastic_launch
from elastane.elastic.multiprocessing import DefaultLogsSpecs, Std
from elastane.options.build import read_nproc


@dataclass(frozen=True)
class FunctionRun:
    """A function, or a command, to run on this machine.

    `local_world_size` is the number of workers, or cpu, gpu or auto: one for each GPU, or without
    GPUs one for each CPU. The output of workers is shown and, with `log_dir`, saved there.
    `monitor_interval` (seconds) has no effect, since the end of a worker is noticed at once.
    """

    entrypoint: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    log_dir: str | None = None
    monitor_interval: float = 0.1
    max_restarts: int = 3
    local_world_size: int | str = "auto"
    role: str = "default"

    def run(self) -> dict[int, Any]:
        """Run to the end; return the workers' values, by rank. See elastic_launch."""
        config = LaunchConfig(
            1,
            1,
            read_nproc(str(self.local_world_size), os.environ),
            logs_specs=DefaultLogsSpecs(self.log_dir, tee=Std.ALL if self.log_dir else Std.NONE),
            rdzv_backend="elastane",
            role=self.role,
            monitor_interval=self.monitor_interval,
            max_restarts=self.max_restarts,
        )
        return elastic_launch(config, self.entrypoint)(*self.args)
