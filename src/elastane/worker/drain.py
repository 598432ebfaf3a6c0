"""`should_checkpoint()`: tells a training script that its workers are about to be stopped.

Owns the worker's half of a drain. Every call is counted. While the agent drains, a call waits until
the job has agreed on one call number at which all workers checkpoint, since a checkpoint is often a
collective. It fails open: without a status page, with garbage on it, in a forked child, or when the
agent does not answer in time, it returns False and training continues.
"""

from __future__ import annotations

import os
import sys
import time

from elastane.process.status_page import PAGE_FD_VARIABLE, WorkerPage, finish_before_park

# Agreement takes one step of the slowest worker; a drain lasts 30 s by default.
AGREEMENT_TIMEOUT_S = 60.0
# A worker that has checkpointed is stopped within the drain, unless the drain was lost.
PARKED_TIMEOUT_S = 120.0
POLL_S = 0.001


_page: WorkerPage | None = None
_is_open = False
# Set when no answer came in time, so that later steps do not wait as long again.
_gave_up = False


def should_checkpoint() -> bool:
    """Return whether to checkpoint now, before this worker is stopped.

    Call it once a step, on every rank, at the same place:

        while elastane.should_checkpoint():
            save_checkpoint()

    It is True at the same call on all ranks. The next call, here the second of the loop, waits
    until the worker is stopped. So no step follows the checkpoint, and none is lost.
    """
    page = _page
    if page is None:
        if _is_open:
            return False
        page = _open()
        if page is None:
            return False
    calls, gate = page.count()
    return bool(gate) and _drained(page, calls)


def _drained(page: WorkerPage, calls: int) -> bool:
    global _gave_up  # noqa: PLW0603 - one page per process
    if _gave_up or not _wait(page, AGREEMENT_TIMEOUT_S, until_target=True):
        _gave_up = page.gated
        return False
    target = page.target
    if calls <= target:
        return calls == target
    finish_before_park()
    page.park(True)
    _gave_up = not _wait(page, PARKED_TIMEOUT_S, until_target=False) and page.gated
    page.park(False)
    return False


def _wait(page: WorkerPage, timeout_s: float, until_target: bool) -> bool:
    """Wait while gated, or until there is a target; False if the gate opened or time ran out."""
    deadline = time.monotonic() + timeout_s
    while page.gated and time.monotonic() < deadline:
        if until_target and page.target:
            return True
        time.sleep(POLL_S)
    return False


def _open() -> WorkerPage | None:
    """Open this worker's status page at the first call; None without one, or in a child process."""
    global _page, _is_open  # noqa: PLW0603 - one page per process
    _is_open = True
    children = sys.modules.get("multiprocessing.process")
    if children is not None and children.parent_process() is not None:
        return None
    try:
        page = WorkerPage.open(int(os.environ[PAGE_FD_VARIABLE]))
    except (KeyError, ValueError, OverflowError, OSError):
        return None
    if page.claim(os.getpid()):
        _page = page
    return _page


def take_page() -> WorkerPage | None:
    """Hand the status page to a job, whose steps count in place of calls of should_checkpoint()."""
    global _page, _is_open
    page = _page or (None if _is_open else _open())
    _page, _is_open = None, True
    return page


def _forget() -> None:
    """Drop the page in a forked child, such as a DataLoader's: its calls are not the worker's."""
    global _page  # noqa: PLW0603 - one page per process
    _page = None


os.register_at_fork(after_in_child=_forget)
