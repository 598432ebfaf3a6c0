"""The watch over the timers that workers set on themselves (TORCHELASTIC_ENABLE_FILE_TIMER=1).

Owns the pipe and one timer of the event loop; whose process a timer is, and how its worker is
ended, is the group's business. torch's watch ends the agent along with the worker; here the worker
alone is ended, which is a failure like others. The wall clock is of this host on both sides; a
clock that was set is looked at again within `_LOOK_S`.
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
    """Reads timers and tells `expire` of each that ran out; False says that it is nobody's."""

    def __init__(self, wished_path: str) -> None:
        self.expire: Callable[[WorkerTimer], bool] = lambda request: False
        self._pipe = TimerPipe(wished_path)
        self._table = TimerTable()
        self._fd = -1
        self._handle: asyncio.TimerHandle | None = None

    @property
    def path(self) -> str:
        """What workers are told as TORCHELASTIC_TIMER_FILE."""
        return self._pipe.path

    def open(self) -> None:
        """Make the pipe and watch it; raises ConfigurationError where it cannot be made."""
        self._fd = self._pipe.open()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def forget(self, pid: int) -> None:
        """Drop the timers of a process that has ended."""
        self._table.forget([pid])

    def close(self) -> None:
        """Watch no more."""
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
            _log.warning("what came over %s is no timer; it is left out", self.path)
        self._look()

    def _look(self) -> None:
        """Tell of what has expired, and come back in time for the next."""
        for request in self._table.expired(time.time()):
            if not self.expire(request):
                _log.warning(
                    "timer %r of process %d expired; that is no process of a worker here",
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
