"""Timers over a multiprocessing queue, between a process and its children."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from queue import Empty
from typing import Any

from elastane.elastic.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]


class LocalTimerClient(TimerClient):
    """Sets timers of this process, by its pid, through the queue of a LocalTimerServer."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See TimerClient."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """See TimerClient."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """A request queue over a queue of multiprocessing."""

    def __init__(self, mp_queue: mp.Queue) -> None:  # type: ignore[type-arg]
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """See RequestQueue."""
        return self._mp_queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """See RequestQueue."""
        found: list[TimerRequest] = []
        end_s = time.monotonic() + timeout
        with contextlib.suppress(Empty):
            while len(found) < size:
                found.append(self._mp_queue.get(timeout=max(0.0, end_s - time.monotonic())))
        return found


class LocalTimerServer(TimerServer):
    """Watches the timers of child processes, and ends those that expire by SIGKILL."""

    def __init__(
        self,
        mp_queue: mp.Queue,  # type: ignore[type-arg]
        max_interval: float = 60,
        daemon: bool = True,
    ) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """See TimerServer."""
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[int]) -> None:
        """See TimerServer."""
        self._timers = {k: v for k, v in self._timers.items() if k[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """See TimerServer."""
        found: dict[Any, list[TimerRequest]] = {}
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                found.setdefault(request.worker_id, []).append(request)
        return found

    def _reap_worker(self, worker_id: int) -> bool:
        try:
            os.kill(worker_id, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return True
