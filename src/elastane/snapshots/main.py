"""The keeper's process: from its start to its end, which is never long after its owner's.

Owns the loop over the three things that can happen: a worker connects, the agent says something or
is gone, time passes. A node's keeper serves whoever of this user connects, for as long as its agent
lives; a worker's own serves that worker. Then it writes what is newest, if that is not durable, and
ends, in any case after a bounded time: nothing of a job is left on its machine. What it holds is
memory without a name, so that nothing is left of that either, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from elastane.process.kernel import show_program
from elastane.protocol.limits import KEEPER_END_S, KEEPER_HELLO_BYTES_MAX, KEEPER_RETURN_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.events import Reporter
from elastane.snapshots.logging import Saying
from elastane.snapshots.peers import FROM_AGENT, Neighbours
from elastane.snapshots.server import SnapshotServer
from elastane.snapshots.startup import CONTROL_FD, LISTENER_FD, NODE, OWN_FD

_DESCRIPTORS_MAX = 1 << 20
# Before the end, what is being written is told to stop, so that half a file is removed.
_STOP_S = 5.0
_ACCEPT_PAUSE_S = 0.05
# What was said last is written for so long.
_SAY_S = 1.0
_log = logging.getLogger("elastane.snapshots")


class Process:
    """One keeper. `control` is the line to the agent."""

    def __init__(
        self, control: socket.socket | None = None, listener: socket.socket | None = None
    ) -> None:
        self._control, self._listener = control, listener
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._is_owned = control is not None
        self._reporter = Reporter(control)
        self._service = SnapshotServer(self._wake, self._reporter.tell, survives=self._is_owned)

    def run(self, own: socket.socket | None = None) -> None:
        """Serve, and return when there is nothing left to do, or no time."""
        if own is not None:
            self._service.take(own)
        self._serve()
        self._end()

    def _serve(self) -> None:
        """Serve until the agent or, where there is none, the worker is gone."""
        is_nodes = self._control is not None
        while self._is_owned or (not is_nodes and self._service.workers):
            looks = [shelf.look() for shelf in self._service.shelves]
            looks.append(self._reporter.left_s())
            ready = self._wait(min((look for look in looks if look is not None), default=None))
            self._reporter.flush()
            # The agent first: what it says of neighbours is there before the first worker is.
            if self._control in ready:
                self._hear()
            if self._listener in ready:
                self._accept()

    def _end(self) -> None:
        """Write what is newest once the workers are gone, for a bounded time."""
        until_s = time.monotonic() + KEEPER_END_S
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        # Its workers end with it, at this moment if they have not yet; nobody else is waited for.
        self._wait_until(lambda: not self._service.workers, time.monotonic() + KEEPER_RETURN_S)
        shelves = self._service.shelves
        for shelf in shelves:
            shelf.leave()
        self._wait_until(lambda: all(s.is_idle for s in shelves), until_s - _STOP_S)
        for shelf in shelves:
            shelf.stop()
        self._wait_until(lambda: all(s.is_idle for s in shelves), until_s)
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
        except OSError:  # it gave up, or this process is out of descriptors for now
            time.sleep(_ACCEPT_PAUSE_S)
        else:
            self._service.take(end)

    def _hear(self) -> None:
        """The agent has said something, or is gone."""
        assert self._control is not None, "it was ready"
        try:
            word = FROM_AGENT.decode(self._control.recv(KEEPER_HELLO_BYTES_MAX))
        except (OSError, *UNREADABLE) as error:
            _log.debug("the agent is gone: %r", error)
        else:
            if isinstance(word, Neighbours):
                self._service.meet(word)
                return
            _log.debug("the agent is leaving")
        self._is_owned = False

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")


def main(words: Sequence[str]) -> None:
    """Be the keeper that `words` say: "own" or "node"."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # A drain ends with these for everybody on the node, and what it saved is here.
        signal.signal(number, signal.SIG_IGN)
    kind, is_node = words[0], words[0] == NODE
    os.closerange((LISTENER_FD if is_node else OWN_FD) + 1, _DESCRIPTORS_MAX)
    os.chdir("/")
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    show_program(("elastane-keeper", kind))
    saying = Saying()
    saying.start()
    logging.basicConfig(handlers=[saying], format="%(message)s", level=logging.WARNING)
    if is_node:
        control, listener = socket.socket(fileno=CONTROL_FD), socket.socket(fileno=LISTENER_FD)
        Process(control, listener).run()
    else:
        Process().run(socket.socket(fileno=OWN_FD))
    # Not by the interpreter's way: a thread may hang in storage, and is not waited for.
    saying.finish(_SAY_S)
    os._exit(0)
