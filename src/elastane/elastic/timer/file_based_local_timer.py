"""Timers over a named pipe: torch's client in a worker, and our server in its supervisor.

torch's server kills the agent along with the worker, so the job loses a node instead of restarting
workers. This server is a thin layer over `elastane.process.timers`, which the agent of `elastane
run` uses too. A line that is not a valid request is skipped.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.timer.debug_info_logging import log_debug_info_for_expired_timers
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient, FileTimerRequest

from elastane.process import timers

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
_log = logging.getLogger(__name__)


class FileTimerServer:
    """Watches timers from a pipe, which it makes at `file_path`, in a thread.

    A process whose timer expires is sent its request's signal. Unlike torch's, this server does not
    end its own process as well: the end of the worker is a failure that its supervisor sees.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or (lambda name, request: None)
        Path(file_path).unlink(missing_ok=True)
        self._pipe = timers.TimerPipe(file_path)
        self._fd = self._pipe.open()
        self._table = timers.TimerTable()
        self._stop_signaled = False
        self._run_once = False
        self._watchdog_thread: threading.Thread | None = None
        self._last_progress_time = int(time.time())

    def start(self) -> None:
        """Start to watch."""
        self._watchdog_thread = threading.Thread(target=self._watch, daemon=self._daemon)
        self._watchdog_thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """Stop watching, and remove the pipe."""
        self._stop_signaled = True
        self._join()
        self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Handle the requests that have arrived, then stop."""
        self._run_once = True
        self._join()

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Set or release the requested timers."""
        for each in timer_requests:
            timer = timers.WorkerTimer(
                each.worker_pid, each.scope_id, each.expiration_time, int(each.signal)
            )
            self._table.update(timer)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Drop the timers of these processes, and of processes that have ended."""
        gone = {pid for pid in self._table.pids() if not self.is_process_running(pid)}
        self._table.forget(worker_pids | gone)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Return the timers that expire at `deadline` or before, by process."""
        found: dict[int, list[FileTimerRequest]] = {}
        for timer in self._table.late(deadline):
            found.setdefault(timer.pid, []).append(_request(timer))
        return found

    def get_last_progress_time(self) -> int:
        """Return when the watch loop last ran, seconds since 1970; now if no timer is set."""
        return self._last_progress_time if len(self._table) else int(time.time())

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether there is such a process."""
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except OSError:
            return False
        return True

    def _join(self) -> None:
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        self._pipe.close()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while not self._stop_signaled:
            last = self._run_once
            if not last:
                poller.poll(min(self._max_interval, 0.1) * 1000)
            for request in self._pipe.read():
                self._table.update(request)
            self._reap()
            self._last_progress_time = int(time.time())
            if last:
                return

    def _reap(self) -> None:
        self._table.forget(p for p in self._table.pids() if not self.is_process_running(p))
        expired = self._table.expired(time.time())
        requests = [_request(timer) for timer in expired]
        log_debug_info_for_expired_timers(
            self._run_id, {t.worker_pid: [t.to_json()] for t in requests}
        )
        for timer in requests:
            self._log_event("timer expired", timer)
            if timer.signal > 0 and self._kill(timer):
                self._log_event("kill worker process", timer)

    @staticmethod
    def _kill(timer: FileTimerRequest) -> bool:
        try:
            os.kill(timer.worker_pid, timer.signal)
        except (ProcessLookupError, PermissionError) as error:
            _log.error("worker %d with an expired timer: %s", timer.worker_pid, error)
            return False
        return True


def _request(timer: timers.WorkerTimer) -> FileTimerRequest:
    return FileTimerRequest(timer.pid, timer.scope_id, timer.expiration_time, timer.signal)
