"""Timers that a process sets on itself, so that it is ended where it does not come back in time.

Owns the shapes: a client that sets and releases, a server that watches and reaps. Times are seconds
since 1970 of one host's clock, on both sides. Source: torch.distributed.elastic.timer.
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
    """A timer that is set, or released where `expiration_time` is negative."""

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
        """Release it: it is no longer in effect."""


class RequestQueue(ABC):
    """What a server reads requests from."""

    @abstractmethod
    def size(self) -> int:
        """Return how many there are; more may have come by the time of `get`."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to `size` requests, waiting for at most `timeout` seconds."""


class TimerServer(ABC):
    """Watches timers in a thread, and reaps the workers whose timers expire."""

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
        """Set, or release, what was asked for."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """Return the timers that expire at `deadline` or before, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker; False where that has to be tried again."""

    def start(self) -> None:
        """Begin to watch."""
        self._stop_signaled = False
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Watch no more; returns after `max_interval` seconds at the latest."""
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                _log.exception("the timer watch failed; it goes on")

    def _run_watchdog(self) -> None:
        """Take what has come, and reap whose time is over."""
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._max_interval))
        reaped = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            _log.info("reaping worker %s: timers %s", worker_id, [t.scope_id for t in expired])
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                _log.error("worker %s was not reaped; it is tried again", worker_id)
        self.clear_timers(reaped)

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            _log.exception("worker %s: _reap_worker raised; it counts as reaped", worker_id)
            return True


_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses where it is given none."""
    global _client  # noqa: PLW0603 - one for the process, as in the reference
    _client = timer_client


@contextmanager
def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> Generator[None, None, None]:
    """Have this process ended if the context is not left within `after` seconds.

    `scope` names the timer, by default the line of the `with`. RuntimeError where no client is
    configured and none is given.
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
