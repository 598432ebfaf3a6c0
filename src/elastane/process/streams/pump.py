"""One thread that copies the captured streams of a group to the console, and ends with them.

This module owns the order of turns. A stream whose console is full is not read, so its worker waits
as it would for the console itself; other streams continue. When a worker has ended, the rest of its
output is read from the kernel before its last lines are reported. At the end everything is
displayed, unless the console accepts nothing for `CAPTURE_STALL_S`; the loss is then reported.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from elastane.process.streams.bounds import (
    CAPTURE_PARTIAL_S,
    CAPTURE_PAUSE_S,
    CAPTURE_READ_BYTES,
    CAPTURE_STALL_S,
    FINISH_S,
    SETTLE_S,
)
from elastane.process.streams.capture import Capture
from elastane.process.streams.patience import ConsoleTimeout


class Pump:
    """The thread over all captures of a group; it starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._captures: list[Capture] = []
        self._drains: list[tuple[Capture, threading.Event]] = []
        self._wake_fd = -1
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether there is output to wait for."""
        return self._thread is not None

    def add(self, capture: Capture) -> None:
        """Copy one more open stream."""
        with self._lock:
            self._captures.append(capture)
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._wake()

    def drain(self, capture: Capture) -> bool:
        """Wait until the tail holds all output so far and, within `SETTLE_S`, the console has it.

        The agent calls this before it reports on the output.
        """
        if not self.is_running:
            return True
        done = threading.Event()
        with self._lock:
            self._drains.append((capture, done))
        self._wake()
        return done.wait(SETTLE_S)

    def stop(self, on_done: Callable[[], None]) -> None:
        """Display the rest, close everything, call `on_done` in the thread."""
        self._on_done = on_done
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """Have the thread look up; it may have ended, and another file have the number."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            now_s = time.monotonic()
            taken_bytes = sum(self._copy(capture, now_s) for capture in self._open())
            self._drain_all(now_s)
            if taken_bytes < CAPTURE_READ_BYTES:
                time.sleep(
                    CAPTURE_PAUSE_S
                )  # So that a trickle of lines does not wake this thread for each line.
        self._finish()
        self._on_done()

    @staticmethod
    def _copy(capture: Capture, now_s: float) -> int:
        taken_bytes = capture.copy(now_s)
        capture.flush(now_s)
        return taken_bytes

    def _open(self) -> list[Capture]:
        with self._lock:
            return [c for c in self._captures if c.is_open or c.unsent_bytes]

    def _wait(self) -> None:
        """Wait until a readable stream has output, or a timeout passes."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        timeout_s: float | None = None
        for capture in self._open():
            if not capture.has_room and capture.console is not None:
                # The other streams of this console wait too; nothing else is as urgent.
                capture.console.wait_spare(CAPTURE_PAUSE_S)
                timeout_s = 0.0
            elif capture.is_open:
                poller.register(capture.fd, select.POLLIN)
            if capture.unsent_bytes and timeout_s is None:
                timeout_s = CAPTURE_PARTIAL_S
        ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _drain_all(self, now_s: float) -> None:
        with self._lock:
            drains, self._drains = self._drains, []
        for capture, done in drains:
            capture.copy(now_s, drain=True)
            capture.flush(now_s, final=True)
            if capture.unsent_bytes and not self._stopping:
                with self._lock:
                    self._drains.append((capture, done))
            else:
                done.set()

    def _finish(self) -> None:
        """Display the rest while the consoles accept it."""
        consoles = {c.console for c in self._captures if c.console is not None}
        timeout = ConsoleTimeout(FINISH_S, CAPTURE_STALL_S)
        while True:
            now_s = time.monotonic()
            for capture in self._captures:
                # Only processes whose output does not matter hold these streams: read what is
                # there.
                capture.copy(now_s)
                capture.flush(now_s, final=True)
            self._drain_all(now_s)
            behind = any(c.unsent_bytes or not c.has_room for c in self._captures)
            behind = behind or not all(console.wait_empty(0) for console in consoles)
            if not behind or not timeout.lasts(sum(c.written_bytes for c in consoles)):
                break
            time.sleep(CAPTURE_PAUSE_S)
        for capture in self._captures:
            lost_bytes = capture.close()
            if lost_bytes and capture.console is not None:
                capture.console.put(b"[elastane: %d bytes of output were lost here]\n" % lost_bytes)
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
