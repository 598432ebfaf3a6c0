"""Signals that end a program which waits for an agent: raised in its main thread, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


class SignalReceived(BaseException):
    """A signal came whose default is this program's end."""

    def __init__(self, sigval: signal.Signals) -> None:
        super().__init__(sigval.name)
        self.sigval = sigval


@contextlib.contextmanager
def raised(
    signals: Iterable[signal.Signals], make: Callable[[signal.Signals], BaseException]
) -> Iterator[None]:
    """Raise `make(signal)` in the main thread at each of these signals, within the context.

    In any other thread they stay as they are: Python tells signals to the main thread alone.
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
            # None: set by something that is not Python, and not to be put back from here.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def unheard(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return those whose handler would tell an event loop of this thread, which does not turn."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ()
    calm = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    return tuple(one for one in signals if signal.getsignal(one) not in calm)


def at_default(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return those that nobody handles and nobody ignores."""
    return tuple(one for one in signals if signal.getsignal(one) is signal.SIG_DFL)
