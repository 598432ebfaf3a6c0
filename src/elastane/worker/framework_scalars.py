"""The scalars that a script logs through its framework, written by the worker of rank 0.

The framework calls `log` at the same steps on all workers. All keep their newest values, so that
the next rank 0 adds what a lost one had not written. A step that the sinks have already is left
out, as after a restart from an older checkpoint.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from elastane.process import environment
from elastane.worker.scalars import ScalarLog


class FrameworkScalars:
    """The scalars that a framework logs, for the sinks of `job.log_to`."""

    def __init__(self, targets: tuple[Any, ...]) -> None:
        self._log = ScalarLog()
        self._log.add_sinks(targets)
        self._log.show_in_job()
        self._is_writer = self._has_logged = False

    def log(
        self, values: Mapping[str, Any], step: int, *, is_writer: bool, is_resumed: bool
    ) -> None:
        """Log the numbers among `values`, after `step` steps.

        `is_writer`: this worker has rank 0 now. `is_resumed`: the training began at a checkpoint,
        so that the sinks may have its steps before.
        """
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if is_writer != self._is_writer or not self._has_logged:
            atexit.unregister(self.end)
            atexit.register(self.end)
            is_first = not (is_resumed or self._has_logged) and _is_first_world()
            before = 0 if is_first else max(step - 1, 0)
            self._log.enter(is_writer=is_writer, committed=before, is_first=is_first)
            self._is_writer, self._has_logged = is_writer, True
        self._log.add(numbers, step)

    def end(self) -> None:
        """Bring the sinks up to date, and close them; a later `log` opens them again."""
        atexit.unregister(self.end)
        self._log.end()
        self._is_writer = False


def _is_first_world() -> bool:
    """Whether no world of the job has trained before the one in which this worker began."""
    round_, attempt = environment.get("ELASTANE_ROUND"), environment.get("ELASTANE_ATTEMPT")
    return int(round_ or 0) <= 1 and int(attempt or 0) == 0
