"""`should_checkpoint()`: how a training script hears that its workers are about to be stopped.

Owns the worker's half of a drain. Every call is counted; while the agent drains, a call waits
until the job has agreed on one call number at which all workers checkpoint, since a checkpoint is
often a collective. Fails open: without a page, with garbage, in a forked child, or when nobody
answers in time, it is False and training goes on.
"""

from __future__ import annotations

import os
import sys
import time

from elastane.process.status_page import PAGE_FD_VARIABLE, WorkerPage, finish_before_park

# The job agrees within a step of its slowest worker, and a drain lasts 30 s by default.
AGREEMENT_TIMEOUT_S = 60.0
# Parked after the checkpoint: stopped within the drain, unless the drain itself was lost.
PARKED_TIMEOUT_S = 120.0
POLL_S = 0.001


_page: WorkerPage | None = None
_is_open = False
# Set when nobody answered in time, so that the steps after it are not each held up as long.
_gave_up = False


def should_checkpoint() -> bool:
    """Return whether to checkpoint now, before this worker is stopped.

    Call it once a step, on every rank, at the same place:

        while elastane.should_checkpoint():
            save_checkpoint()

    It is True at the same call on all ranks; the call after that one, here the loop's second,
    waits until the worker is stopped. So no step is done after the checkpoint, and none redone.
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
    """Wait while gated (at most until there is a target); False when the gate went or time did."""
    deadline = time.monotonic() + timeout_s
    while page.gated and time.monotonic() < deadline:
        if until_target and page.target:
            return True
        time.sleep(POLL_S)
    return False


def _open() -> WorkerPage | None:
    """Open this worker's page at the first call; none where it has none, or is only a child."""
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
    """Return the page, for a job whose steps count in place of calls of should_checkpoint()."""
    global _page, _is_open
    page = _page or (None if _is_open else _open())
    _page, _is_open = None, True
    return page


def _forget() -> None:
    """In a forked child, such as a DataLoader's, whose calls are not the worker's."""
    global _page  # noqa: PLW0603 - one page per process
    _page = None


os.register_at_fork(after_in_child=_forget)
