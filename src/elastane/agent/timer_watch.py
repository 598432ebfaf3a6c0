"""Watches the timers that workers set on themselves (TORCHELASTIC_ENABLE_FILE_TIMER=1).

Owns the pipe and one timer of the event loop; the worker group decides which worker to end. torch's
watch ends the agent together with the worker; here only the worker is ended, as a failure like
others. Both sides read the wall clock of this host, and a changed clock is noticed within
`_LOOK_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from elastane.process.timers import TimerPipe, TimerTable, WorkerTimer

_log = logging.getLogger("elastane.timers")
_LOOK_S = 1.0


class TimerWatch:
    """Reads timers, and passes each expired one to the current worker group."""

    def __init__(self, requested_path: str) -> None:
        self._expire: Callable[[WorkerTimer], bool] = lambda request: False
        self._pipe = TimerPipe(requested_path)
        self._table = TimerTable()
        self._fd = -1
        self._handle: asyncio.TimerHandle | None = None

    @property
    def path(self) -> str:
        """The value of TORCHELASTIC_TIMER_FILE for the workers."""
        return self._pipe.path

    def open(self) -> None:
        """Create the pipe and watch it; raises ConfigurationError if that fails."""
        self._fd = self._pipe.open()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def pass_to(self, expire: Callable[[WorkerTimer], bool]) -> None:
        """Call `expire` for each expired timer from here on; False: its process is no worker's."""
        self._expire = expire

    def forget(self, pid: int) -> None:
        """Drop the timers of a process that has ended."""
        self._table.forget([pid])

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = -1
        if self._handle is not None:
            self._handle.cancel()
        self._pipe.close()

    def _read(self) -> None:
        refused = self._pipe.refused
        for request in self._pipe.read():
            if not self._table.update(request):
                _log.warning("too many timers: %r of process %d is not set",
                             request.scope_id, request.pid)  # fmt: skip
        if self._pipe.refused > refused:
            _log.warning("a message on %s is not a timer and is ignored", self.path)
        self._look()

    def _look(self) -> None:
        """Report expired timers, and schedule the next look."""
        for request in self._table.expired(time.time()):
            if not self._expire(request):
                _log.warning(
                    "timer %r of process %d expired, but no worker here owns that process",
                    request.scope_id,
                    request.pid,
                )
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        due_s = self._table.due_s
        if due_s is not None:
            delay_s = min(_LOOK_S, max(0.0, due_s - time.time()))
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._look)
