"""Raises signals as exceptions in the main thread of a program that waits for an agent."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


class SignalReceived(BaseException):
    """A signal arrived whose default action ends this program."""

    def __init__(self, sigval: signal.Signals) -> None:
        super().__init__(sigval.name)
        self.sigval = sigval


@contextlib.contextmanager
def raise_on(
    signals: Iterable[signal.Signals], make: Callable[[signal.Signals], BaseException]
) -> Iterator[None]:
    """Raise `make(signal)` in the main thread on each of these signals, within the context.

    In other threads the signals stay as they are: Python handles signals in the main thread only.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        raise make(signal.Signals(signum))

    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for one in signals:
                before[one] = signal.signal(one, handle)
        yield
    finally:
        for one, handler in before.items():
            # None: the handler was set outside Python, so it cannot be restored here.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def handled_by_loop(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return the signals whose handler would call an event loop that this thread blocks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ()
    python_defaults = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    return tuple(one for one in signals if signal.getsignal(one) not in python_defaults)


def with_default_handler(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return the signals that are neither handled nor ignored."""
    return tuple(one for one in signals if signal.getsignal(one) is signal.SIG_DFL)
