"""Health checks over HTTP: 200 while `alive_callback` reports recent progress, else 503.

It runs `elastane.process.health` in a thread. (torch's server does nothing.) How it fails: a port
that is taken is logged, and health checks are not answered.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial

from elastane.process.health import HealthServer

__all__ = ["HealthCheckServer", "create_healthcheck_server"]
_log = logging.getLogger(__name__)
_START_S = 10.0


class HealthCheckServer:
    """Answers on `port` whether the time of `alive_callback()` is at most `timeout` s ago.

    Times are seconds since 1970.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._thread: threading.Thread | None = None
        # Ends the server's loop; None until it listens.
        self._end: Callable[[], object] | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        """Returns the time of the last progress."""
        return self._alive_callback

    def start(self) -> None:
        """Listen; if the port is taken, log it and serve nothing."""
        if self._thread is not None:
            return
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="health-check", daemon=True
        )
        self._thread.start()
        ready.wait(_START_S)

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        end, self._end = self._end, None
        if end is not None:
            end()
        thread.join(_START_S)

    async def _serve(self, ready: threading.Event) -> None:
        server = HealthServer(self._alive_callback, self._port, float(self._timeout))
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            await server.start()
        except OSError as error:
            _log.error("no health checks on port %s: %s", self._port, error)
            ready.set()
            return
        self._port = server.port
        self._end = partial(loop.call_soon_threadsafe, stopped.set)
        ready.set()
        await stopped.wait()
        server.close()


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """Return a server; call `start` to begin."""
    return HealthCheckServer(alive_callback, port, timeout)
