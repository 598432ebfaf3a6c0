"""Ends a worker whose timer expired, and says why in its failure.

It signals only processes of this group's workers: a worker itself, or a process of its session.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from datetime import UTC, datetime

from elastane.agent.worker import LocalWorker
from elastane.process.timers import WorkerTimer

SLUG = "timer-expired"


def end_expired(workers: Iterable[LocalWorker], request: WorkerTimer) -> bool:
    """Send the timer's signal; False if the process is alive and belongs to no worker here."""
    try:
        pidfd = os.pidfd_open(request.pid)
    except OSError:
        return True  # The process has ended, and its timer with it.
    try:
        # While the descriptor is open, the pid remains this process's until it is reaped.
        worker = _owner(workers, request.pid)
        if worker is None:
            return False
        if request.signal > 0:
            worker.ended_because = _reason(request)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, request.signal)
    finally:
        os.close(pidfd)
    return True


def _owner(workers: Iterable[LocalWorker], pid: int) -> LocalWorker | None:
    try:
        session = os.getsid(pid)
    except ProcessLookupError:
        return None
    alive = {w.process.pid: w for w in workers if w.process is not None and w.is_alive}
    return alive.get(pid) or alive.get(session)


def _reason(request: WorkerTimer) -> str:
    deadline = datetime.fromtimestamp(request.expiration_time, UTC).isoformat(
        timespec="milliseconds"
    )
    names = {int(known): known.name for known in signal.Signals}
    name = names.get(request.signal, f"signal {request.signal}")
    return (
        f"timer {request.scope_id!r} of process {request.pid} was not released by its deadline,"
        f" {deadline}: {name} was sent [{SLUG}]"
    )
