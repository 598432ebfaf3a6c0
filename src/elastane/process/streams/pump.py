"""One thread that copies the captured streams of a group to the console, and ends with them.

It owns the order of turns: a stream whose console is full is not read, so its worker waits as it
would for the console itself; the others go on. A worker that has ended is settled: what it left
in the kernel is taken in before anybody asks for its last words. At the end all is shown, unless
the console takes nothing for `CAPTURE_STALL_S`; what is lost then is said.
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
        self._settles: list[tuple[Capture, threading.Event]] = []
        self._wake_fd = -1
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether there is anything to wait for."""
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

    def settle(self, capture: Capture) -> bool:
        """Wait until all that was written so far is in the memory of the stream's end.

        And, within `SETTLE_S`, until the console has it: before the agent says what it makes of it.
        """
        if not self.is_running:
            return True
        done = threading.Event()
        with self._lock:
            self._settles.append((capture, done))
        self._wake()
        return done.wait(SETTLE_S)

    def stop(self, on_done: Callable[[], None]) -> None:
        """Show the rest, close all, call `on_done` in the thread."""
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
            self._settle_all(now_s)
            if taken_bytes < CAPTURE_READ_BYTES:
                time.sleep(
                    CAPTURE_PAUSE_S
                )  # So that a trickle of lines does not wake this for each.
        self._finish()
        self._on_done()

    @staticmethod
    def _copy(capture: Capture, now_s: float) -> int:
        taken_bytes = capture.take(now_s)
        capture.flush(now_s)
        return taken_bytes

    def _open(self) -> list[Capture]:
        with self._lock:
            return [c for c in self._captures if c.is_open or c.unsent_bytes]

    def _wait(self) -> None:
        """Wait until a stream that may be read has something, or a time has come."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        timeout_s: float | None = None
        for capture in self._open():
            if not capture.has_room and capture.console is not None:
                # Those that share the console wait as well; nothing else is so urgent.
                capture.console.wait_spare(CAPTURE_PAUSE_S)
                timeout_s = 0.0
            elif capture.is_open:
                poller.register(capture.fd, select.POLLIN)
            if capture.unsent_bytes and timeout_s is None:
                timeout_s = CAPTURE_PARTIAL_S
        ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def _settle_all(self, now_s: float) -> None:
        with self._lock:
            settles, self._settles = self._settles, []
        for capture, done in settles:
            capture.take(now_s, settling=True)
            capture.flush(now_s, final=True)
            if capture.unsent_bytes and not self._stopping:
                with self._lock:
                    self._settles.append((capture, done))
            else:
                done.set()

    def _finish(self) -> None:
        """Show the rest, for as long as the consoles take it."""
        consoles = {c.console for c in self._captures if c.console is not None}
        patience = ConsoleTimeout(FINISH_S, CAPTURE_STALL_S)
        while True:
            now_s = time.monotonic()
            for capture in self._captures:
                # What is still open is held by nobody who is to be heard: take what is there.
                capture.take(now_s)
                capture.flush(now_s, final=True)
            self._settle_all(now_s)
            behind = any(c.unsent_bytes or not c.has_room for c in self._captures)
            behind = behind or not all(console.wait_empty(0) for console in consoles)
            if not behind or not patience.lasts(sum(c.written_bytes for c in consoles)):
                break
            time.sleep(CAPTURE_PAUSE_S)
        for capture in self._captures:
            lost_bytes = capture.close()
            if lost_bytes and capture.console is not None:
                capture.console.put(b"[elastane: %d bytes of output were lost here]\n" % lost_bytes)
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
