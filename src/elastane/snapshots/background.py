"""Low-priority work of a snapshot server: computing digests and freeing memory.

Its threads have a low priority, so that they do not slow the training down. A task that raises
is our bug: the exception is logged and the next task runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("elastane.snapshots")
# Leaves this work a tenth of a processor when the training needs all of them.
_NICE = 10


class Background:
    """Runs tasks in turn, in one thread that is busy for at most `share` of the time."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshot-background", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task; returns at once."""
        self._tasks.put(task)

    def _run(self) -> None:
        lower_priority()
        while True:
            task = self._tasks.get()
            began_s = time.monotonic()
            try:
                task()
            except Exception:
                _log.exception("a task in the background failed")
            del task  # It may hold the owners of descriptors.
            time.sleep((time.monotonic() - began_s) * (1 / self._share - 1))


def lower_priority() -> None:
    """Give the calling thread, and threads it starts, a low priority.

    The process keeps its priority, because workers wait for the threads that answer them.
    SCHED_IDLE would be too low: on a busy host, a thread suspended while it holds the
    interpreter's lock would block the threads that answer.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
