"""Timers that end a worker which does not finish a block of code in time.

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        ...

These are torch's own timers with two exceptions. `expires` names a timer by the line of the `with`,
where torch's names a line of contextlib. `FileTimerServer` ends only the worker; see
file_based_local_timer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getframeinfo, stack

from torch.distributed.elastic.timer import api as torchs
from torch.distributed.elastic.timer.api import (
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
)
from torch.distributed.elastic.timer.local_timer import LocalTimerClient, LocalTimerServer

from elastane.elastic import use_itself, use_torchs
from elastane.elastic.timer.file_based_local_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
)

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]


@contextmanager
def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> Iterator[None]:
    """End this process if the context is not left within `after` seconds.

    `scope` names the timer, by default the line of the `with`. RuntimeError without a client.
    """
    if scope is None:
        caller = getframeinfo(stack()[2][0])  # above this generator and its context manager
        scope = f"{caller.filename}#{caller.lineno}"
    with torchs.expires(after, scope, client):
        yield


use_itself(__name__, "api")
use_torchs(__name__, "debug_info_logging", "local_timer")
