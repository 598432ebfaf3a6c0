"""Blocking calls off the event loop, each with a bound in time, all with a bound in number.

A file operation on a dead NFS server or a look-up at a dead resolver blocks its thread for
minutes and cannot be cancelled. So calls run in daemon threads of their own: one that hangs
neither holds up the loop, nor the executor that others use, nor the end of the process (the
interpreter joins the threads of `asyncio.to_thread` at exit, and daemon threads never).

How it fails: TimeoutError when the bound passes, the thread then ends whenever its call does;
OffloadFullError when too many calls hang already.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from elastane.protocol.limits import OFFLOAD_THREADS_MAX

T = TypeVar("T")
_IDLE_S = 5.0


class OffloadFullError(TimeoutError):
    """As many calls hang as may, so that no further one was begun."""


class Offload:
    """Runs blocking calls for one event loop, `threads_max` at a time.

    A thread that has returned waits a while for the next call: starting one costs several times
    what a small file operation does (0.3 ms of CPU, cold), and a candidate looks ten times a
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
        """Number of calls that have not returned yet."""
        return self._running

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Return what `call()` returns, or raise what it raises, within `timeout_s`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def body() -> Callable[[], None]:
            outcome = _outcome(future, call)

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody asks any more
                    loop.call_soon_threadsafe(outcome)

            return tell

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
        """Run calls until none has come for a while; each was counted in by `_submit`."""
        while True:
            try:
                body = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle == 0:  # counted in just now: a call is on its way
                        continue
                    self._idle -= 1
                    return
            tell = body()
            # Before the caller hears of it, who may call again at once and must find room.
            with self._lock:
                self._running -= 1
                self._idle += 1
            tell()
            del body, tell  # they hold the caller's future


def _outcome(future: asyncio.Future[T], call: Callable[[], T]) -> Callable[[], None]:
    """Run `call` and return what tells `future` of it, if anybody still waits there."""
    try:
        result = call()
    except Exception as error:
        # The frames' locals would keep the folder's files and buffers alive with the error.
        failure = error
        return lambda: None if future.done() else future.set_exception(failure)
    return lambda: None if future.done() else future.set_result(result)
