"""Waits for and ends child processes of the user's own process, and no others."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time

_log = logging.getLogger(__name__)
# How long to wait after SIGKILL: a process in uninterruptible sleep is given up with an error.
KILL_WAIT_S = 5.0
_POLL_S = 0.01


def wait_any(pids: list[int], timeout_s: float) -> None:
    """Return when one of these children has ended, or after `timeout_s`."""
    poller = select.poll()
    fds = []
    try:
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return  # It has ended and was reaped already.
            poller.register(fds[-1], select.POLLIN)
        poller.poll(max(0.0, timeout_s) * 1000)
        if not pids:
            time.sleep(min(timeout_s, _POLL_S))
    finally:
        for fd in fds:
            os.close(fd)


def end_all(pids: list[int], death_sig: signal.Signals, timeout_s: float) -> None:
    """Signal each child's session, and kill the processes that remain after the timeout."""
    for pid in pids:
        _signal_session(pid, death_sig)
    left = _wait_gone(pids, timeout_s)
    if left:
        _log.warning("processes %s did not end by %s: SIGKILL", left, death_sig.name)
    for pid in pids:
        _signal_session(pid, signal.SIGKILL)
    left = _wait_gone(left, KILL_WAIT_S)
    if left:
        _log.error("processes %s cannot be killed (uninterruptible sleep?), ignoring them", left)


def _wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until all of these children have ended; return those that have not."""
    end_s = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in pids if _runs(pid)]
        if not left or time.monotonic() >= end_s:
            return left
        wait_any(left[:1], min(end_s - time.monotonic(), 1.0))


def _runs(pid: int) -> bool:
    """Whether a child still runs; one that has ended is left for its parent to reap."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is None


def _signal_session(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)  # The child may not lead its own session yet.
