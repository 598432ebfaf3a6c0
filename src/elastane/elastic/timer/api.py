"""Timers that a process sets on itself: it is ended if it does not release them in time.

Owns the interfaces: a client that sets and releases timers, and a server that watches them and ends
processes. Times are seconds since 1970 by one host's clock, on both sides. Source:
torch.distributed.elastic.timer.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from inspect import getframeinfo, stack
from typing import Any

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
_log = logging.getLogger(__name__)


class TimerRequest:
    """A timer to set, or to release if `expiration_time` is negative."""

    __slots__ = ["expiration_time", "scope_id", "worker_id"]

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return False
        mine = (self.worker_id, self.scope_id, self.expiration_time)
        return mine == (other.worker_id, other.scope_id, other.expiration_time)

    def __hash__(self) -> int:
        return hash((self.worker_id, self.scope_id, self.expiration_time))


class TimerClient(ABC):
    """Sets timers of this process."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of a scope."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release the timer of a scope."""


class RequestQueue(ABC):
    """The queue that a server reads requests from."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of requests; more may arrive before `get`."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests; wait at most `timeout` seconds."""


class TimerServer(ABC):
    """Watches timers in a thread, and reaps workers whose timers expire."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or release the requested timers."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """Return the timers that expire at `deadline` or before, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker; return False to be called again."""

    def start(self) -> None:
        """Start to watch."""
        self._stop_signaled = False
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Stop watching; returns after `max_interval` seconds at the latest."""
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                _log.exception("the timer watchdog failed, and continues")

    def _run_watchdog(self) -> None:
        """Register new requests, and reap workers with expired timers."""
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._max_interval))
        reaped = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            _log.info("reaping worker %s: timers %s", worker_id, [t.scope_id for t in expired])
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                _log.error("worker %s was not reaped, retrying", worker_id)
        self.clear_timers(reaped)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            _log.exception("worker %s: _reap_worker raised; it counts as reaped", worker_id)
            return True


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the default client of `expires`."""
    global _client  # noqa: PLW0603 - one for the process, as in torch
    _client = timer_client


@contextmanager
def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> Generator[None, None, None]:
    """End this process if the context is not left within `after` seconds.

    `scope` names the timer, by default the line of the `with`. RuntimeError without a client.
    """
    client = client or _client
    if client is None:
        raise RuntimeError("no timer client: call configure(...) before countdown timers are used")
    if scope is None:
        caller = getframeinfo(stack()[2][0])  # above this generator and its context manager
        scope = f"{caller.filename}#{caller.lineno}"
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
