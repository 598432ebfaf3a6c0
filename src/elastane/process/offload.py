"""Runs blocking calls off the event loop, each with a timeout, all with a bound on their number.

A file operation on a dead NFS server or a look-up at a dead resolver blocks its thread for minutes
and cannot be cancelled. So calls run in their own daemon threads. A hanging call then blocks
neither the loop, nor a shared executor, nor the exit of the process: the interpreter joins the
threads of `asyncio.to_thread` at exit, but no daemon threads.

It fails with TimeoutError when the timeout passes; the thread ends when its call does. It fails
with OffloadFullError when too many calls hang already.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

# Blocking calls of one process that may hang at a time (each holds a thread) before more fail.
OFFLOAD_THREADS_MAX = 8

T = TypeVar("T")
_IDLE_S = 5.0


class OffloadFullError(TimeoutError):
    """The maximum number of calls hang, so no further call was started."""


class Offload:
    """Runs blocking calls for one event loop, at most `threads_max` at a time.

    A thread whose call has returned waits for the next one. Starting a thread costs several times
    as much as a small file operation (0.3 ms of CPU, cold), and a candidate polls ten times a
    second.
    """

    def __init__(self, threads_max: int = OFFLOAD_THREADS_MAX) -> None:
        self.threads_max = threads_max
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], Callable[[], None]]] = queue.SimpleQueue()
        self._running = 0
        self._idle = 0

    @property
    def running(self) -> int:
        """Number of calls that have not returned."""
        return self._running

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Return what `call()` returns, or raise what it raises, within `timeout_s`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def body() -> Callable[[], None]:
            outcome = _outcome(future, call)

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has closed, so no caller waits
                    loop.call_soon_threadsafe(outcome)

            return notify

        self._submit(body)
        async with asyncio.timeout(timeout_s):
            return await future

    def _submit(self, body: Callable[[], Callable[[], None]]) -> None:
        with self._lock:
            if self._running >= self.threads_max:
                raise OffloadFullError(f"{self._running} blocking calls hang")
            if self._idle:
                self._idle -= 1
            else:
                try:
                    threading.Thread(
                        target=self._work, name="elastane-offload", daemon=True
                    ).start()
                except RuntimeError as error:
                    raise OffloadFullError(f"no thread for a blocking call: {error}") from error
            self._running += 1
        self._calls.put(body)

    def _work(self) -> None:
        """Run calls until none has come for `_IDLE_S`; `_submit` has counted each of them."""
        while True:
            try:
                body = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle == 0:  # a call was counted just now and is about to arrive
                        continue
                    self._idle -= 1
                    return
            notify = body()
            # Before the caller is notified, because it may call again at once and must find room.
            with self._lock:
                self._running -= 1
                self._idle += 1
            notify()
            del body, notify  # they hold the caller's future


def _outcome(future: asyncio.Future[T], call: Callable[[], T]) -> Callable[[], None]:
    """Run `call`; return the function that sets its result on `future`, if it is awaited."""
    try:
        result = call()
    except Exception as error:
        failure = error  # the name `error` is unbound when the block ends
        return lambda: None if future.done() else future.set_exception(failure)
    return lambda: None if future.done() else future.set_result(result)
