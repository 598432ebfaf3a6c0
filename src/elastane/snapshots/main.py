"""The process of a snapshot server, from its start to its end shortly after its owner's.

Owns the loop over three events: a worker connects, the agent sends a message or is gone, time
passes. A node's server serves every worker of this user for as long as its agent lives; a server
that a worker started serves that worker. Then it performs the final flush and ends within a bounded
time. Its memory has no name, so that nothing of a job stays on the machine however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

from elastane.process.kernel import show_program
from elastane.protocol.limits import KEEPER_END_S, KEEPER_HELLO_BYTES_MAX, KEEPER_RETURN_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.events import EventReporter
from elastane.snapshots.messages import FROM_AGENT, ReplicationSettings
from elastane.snapshots.server import SnapshotServer
from elastane.snapshots.startup import CONTROL_FD, LISTENER_FD, NODE, OWN_FD

_DESCRIPTORS_MAX = 1 << 20
# Writes are asked to stop this long before the end, so that they remove partial files.
_STOP_S = 5.0
_ACCEPT_PAUSE_S = 0.05
# The longest wait for the last log lines.
_SAY_S = 1.0
_log = logging.getLogger("elastane.snapshots")


class ServerProcess:
    """One snapshot server. `control` is the socket to the agent."""

    def __init__(
        self, control: socket.socket | None = None, listener: socket.socket | None = None
    ) -> None:
        self._control, self._listener = control, listener
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._is_owned = control is not None
        self._reporter = EventReporter(control)
        self._server = SnapshotServer(self._wake, self._reporter.report, survives=self._is_owned)

    def run(self, own: socket.socket | None = None) -> None:
        """Serve until nothing is left to do, or the time is over."""
        if own is not None:
            self._server.serve(own)
        self._serve()
        self._end()

    def _serve(self) -> None:
        """Serve until the agent, or without one the worker, is gone."""
        is_nodes = self._control is not None
        while self._is_owned or (not is_nodes and self._server.workers):
            looks = [store.flush_if_alone() for store in self._server.stores]
            looks.append(self._reporter.left_s())
            ready = self._wait(min((look for look in looks if look is not None), default=None))
            self._reporter.flush()
            # The agent first, so that its replication settings are known to the first worker.
            if self._control in ready:
                self._receive()
            if self._listener in ready:
                self._accept()

    def _end(self) -> None:
        """Perform the final flush once the workers are gone, within a bounded time."""
        until_s = time.monotonic() + KEEPER_END_S
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        # The agent's workers are ending too; only they are waited for.
        self._wait_until(lambda: not self._server.workers, time.monotonic() + KEEPER_RETURN_S)
        stores = self._server.stores
        for store in stores:
            store.leave()
        self._wait_until(lambda: all(s.is_idle for s in stores), until_s - _STOP_S)
        for store in stores:
            store.stop()
        self._wait_until(lambda: all(s.is_idle for s in stores), until_s)
        self._reporter.flush(last=True)

    def _wait_until(self, is_so: Callable[[], bool], until_s: float) -> None:
        while not is_so() and (left_s := until_s - time.monotonic()) > 0:
            self._wait(left_s)

    def _wait(self, timeout_s: float | None) -> list[socket.socket]:
        control = self._control if self._is_owned else None
        ends = [end for end in (self._woken, control, self._listener) if end is not None]
        ready, _, _ = select.select(ends, [], [], timeout_s)
        if self._woken in ready:
            self._woken.recv(4096)
        return ready

    def _accept(self) -> None:
        assert self._listener is not None, "it was ready"
        try:
            end, _ = self._listener.accept()
        except OSError:  # The worker gave up, or this process has no free descriptor for now.
            time.sleep(_ACCEPT_PAUSE_S)
        else:
            self._server.serve(end)

    def _receive(self) -> None:
        """Handle a message of the agent, or its end."""
        assert self._control is not None, "it was ready"
        try:
            word = FROM_AGENT.decode(self._control.recv(KEEPER_HELLO_BYTES_MAX))
        except (OSError, *UNREADABLE) as error:
            _log.debug("the agent is gone: %r", error)
        else:
            if isinstance(word, ReplicationSettings):
                self._server.replicate(word)
                return
            _log.debug("the agent is leaving")
        self._is_owned = False

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")


def main(words: Sequence[str]) -> None:
    """Run the snapshot server of the kind in `words`: "own" or "node"."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # A drain sends these to every process of the node, and this one holds what was saved.
        signal.signal(number, signal.SIG_IGN)
    kind, is_node = words[0], words[0] == NODE
    os.closerange((LISTENER_FD if is_node else OWN_FD) + 1, _DESCRIPTORS_MAX)
    os.chdir("/")
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    show_program(("elastane-keeper", kind))
    handler = StderrHandler()
    handler.start()
    logging.basicConfig(handlers=[handler], format="%(message)s", level=logging.WARNING)
    if is_node:
        control, listener = socket.socket(fileno=CONTROL_FD), socket.socket(fileno=LISTENER_FD)
        ServerProcess(control, listener).run()
    else:
        ServerProcess().run(socket.socket(fileno=OWN_FD))
    # Not by a normal exit: a thread may be blocked in storage and must not be waited for.
    handler.finish(_SAY_S)
    os._exit(0)


_STDERR = 2
_LINES_MAX = 256
_PAUSE_S = 0.01


class StderrHandler(logging.Handler):
    """Writes records as lines `elastane[keeper PID] text`."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(_LINES_MAX)
        self._thread = threading.Thread(target=self._write, name="snapshot-log", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            text = self.format(record).replace("\n", " | ")
        except (TypeError, ValueError):  # The format string does not fit its arguments.
            self.handleError(record)
            return
        line = f"elastane[keeper {os.getpid()}] {text}\n".encode(errors="replace")
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def finish(self, timeout_s: float) -> None:
        """Wait until every line is written, for at most `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError):  # The reader is gone.
                os.write(_STDERR, line)
            self._lines.task_done()
