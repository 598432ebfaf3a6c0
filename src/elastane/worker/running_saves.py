"""The saves of this process that have begun and not ended, so that none is cut off.

A worker that is to end waits for them: a checkpoint that is written halfway may have replaced the
only whole one. A save that needs other workers is known, too, but never waited for by a worker that
ends, since the others may be gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# A worker that is to end waits this long for its saves. Its agent kills it after
# --shutdown-timeout, which is as long by default.
FINISH_S = 30.0


class RunningSaves:
    """The saves that run, each with its thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all, as a forked child has to: the threads that save are its parent's."""
        self._changed = threading.Condition()
        # By a number: the thread that saves, and whether it needs no other worker.
        self._running: dict[int, tuple[int, bool]] = {}
        self._last = 0

    @property
    def any(self) -> bool:
        """Whether a save runs."""
        return bool(self._running)

    def begin(self, *, alone: bool, thread: int | None = None) -> int:
        """Record that a save begins, by this thread or `thread`; return its number.

        `alone`: it needs no other worker.
        """
        with self._changed:
            self._last += 1
            self._running[self._last] = (threading.get_ident() if thread is None else thread, alone)
            return self._last

    def end(self, number: int) -> None:
        """Record that a save has ended."""
        with self._changed:
            del self._running[number]
            self._changed.notify_all()

    def finish(self, limit_s: float = FINISH_S) -> bool:
        """Wait for the saves of other threads that need no other worker; return whether all ended.

        A save of this thread cannot continue before this returns.
        """
        own = threading.get_ident()

        def ended() -> bool:
            return not any(alone and of != own for of, alone in self._running.values())

        with self._changed:
            return self._changed.wait_for(ended, limit_s)


of_process = RunningSaves()
os.register_at_fork(after_in_child=of_process.forget)


@contextlib.contextmanager
def sigterm_held() -> Iterator[None]:
    """Let a SIGTERM that would kill this process do so only after the block.

    A handler of the script is left as it is. Python runs handlers in the main thread, so nothing is
    held in another thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)
