"""Work of low priority: the digests that detect a snapshot that changed after it was kept.

A dying worker may write anywhere. Therefore the newest snapshot is digested when the host is idle,
and compared before it is given out. It owns no memory. The methods of `Digests` run under the lock
of the snapshot store. If digests cannot be computed, snapshots are given out unverified.

Threads of low priority do not slow the training down. A task of `Background` that raises is our
bug: the exception is logged and the next task runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from elastane.errors import ElastaneError
from elastane.protocol.checkpoints import CHUNK_BYTES, chunks_of
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source, close_all, viewed

_log = logging.getLogger("elastane.snapshots")
# Leaves this work a tenth of a processor when the training needs all of them.
_NICE = 10


class Verification(NamedTuple):
    """A snapshot that must be compared with its known digests."""

    name: Name
    known: tuple[str, ...]
    since: int  # How many workers had ended when the comparison began.


class Digests:
    """The digests of one snapshot store. `newest` is the snapshot that is given out first."""

    def __init__(self) -> None:
        self.newest: Name | None = None
        self._known: dict[Name, tuple[str, ...]] = {}
        self._checked: set[Name] = set()
        self._ended = 0

    def set_newest(self, name: Name | None) -> None:
        """Set the snapshot that is given out first."""
        self.newest = name

    def of(self, name: Name) -> tuple[str, ...] | None:
        """Return the digests of a snapshot's pieces, or None if they were not computed."""
        return self._known.get(name)

    def is_checked(self, name: Name) -> bool:
        """Whether it was verified since the last worker ended."""
        return name in self._checked

    def add(self, name: Name, digests: tuple[str, ...]) -> None:
        """Record the digests of a snapshot."""
        self._known[name] = digests

    def forget(self, name: Name) -> None:
        """Remove a snapshot."""
        self._known.pop(name, None)
        self._checked.discard(name)

    def worker_ended(self) -> None:
        """Discard all verifications: the ended worker may have changed memory since."""
        self._ended += 1
        self._checked.clear()

    def doubt(self) -> Verification | None:
        """Return the newest snapshot if it was not verified since the last worker ended."""
        name = self.newest
        known = self._known.get(name) if name is not None else None
        if name is None or known is None or name in self._checked:
            return None
        return Verification(name, known, self._ended)

    def passed(self, doubt: Verification) -> None:
        """Record a verification, unless a worker ended meanwhile."""
        if doubt.since == self._ended:
            self._checked.add(doubt.name)


def digest_and_close(
    sources: tuple[Source, ...], wanted: Callable[[], bool], threads: int = 1
) -> tuple[str, ...] | None:
    """Return the digest of each source, and close the sources; None without a digest function."""
    try:
        return digests_of(sources, wanted, threads)
    except ElastaneError:
        return None  # xxhash is missing; the writer reports it.
    finally:
        close_all(source.slot for source in sources)


def digests_of(
    sources: Iterable[Source], wanted: Callable[[], bool], threads: int = 1
) -> tuple[str, ...] | None:
    """Return the digest of each source's bytes, or None once `wanted()` is false.

    A GB takes 0.10 s of processor time; mapping the pages is two thirds of that.
    """
    found = []
    for source in sources:
        with viewed(source.slot, source.end - source.first) as view:
            of_chunks = _Chunks(view, wanted).digests(threads)
        if of_chunks is None:
            return None
        found.append(of_chunks)
    return tuple(found)


class _Chunks:
    """The chunks of one view, which several threads digest."""

    def __init__(self, view: memoryview, wanted: Callable[[], bool]) -> None:
        self._view = view
        self._wanted = wanted
        self._left = iter(range(0, len(view), CHUNK_BYTES))
        self._digests: dict[int, str] = {}
        self._failure: BaseException | None = None

    def digests(self, threads: int) -> str | None:
        """Return the digest of all chunks' digests, or None if it is no longer wanted."""
        # Imported late: a server without snapshots needs nothing of storage. Imported from the
        # package, since two threads that import a package and its submodule at the same time,
        # in opposite orders, can deadlock.
        from elastane.storage import digest

        digest_of = digest.digest_of

        helpers = [
            threading.Thread(target=self._digest_chunks, args=(digest_of,), daemon=True)
            for _ in range(min(threads, chunks_of(len(self._view))) - 1)
        ]
        for helper in helpers:
            helper.start()
        self._digest_chunks(digest_of)
        for helper in helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        if len(self._digests) != chunks_of(len(self._view)):
            return None
        return digest_of([digest.encode() for _, digest in sorted(self._digests.items())])

    def _digest_chunks(self, digest_of: Callable[[Iterable[memoryview]], str]) -> None:
        try:
            while self._failure is None and self._wanted():
                at = next(self._left, None)
                if at is None:
                    return
                self._digests[at] = digest_of([self._view[at : at + CHUNK_BYTES]])
        except BaseException as error:  # Raised again in the calling thread.
            self._failure = error


class Background:
    """Runs tasks in turn, in one thread that is busy for at most `share` of the time."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="snapshot-background", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task; returns at once."""
        self._tasks.put(task)

    def _run(self) -> None:
        lower_priority()
        while True:
            task = self._tasks.get()
            began_s = time.monotonic()
            try:
                task()
            except Exception:
                _log.exception("a task in the background failed")
            del task  # It may hold the owners of descriptors.
            time.sleep((time.monotonic() - began_s) * (1 / self._share - 1))


def lower_priority() -> None:
    """Give the calling thread, and threads it starts, a low priority.

    The process keeps its priority, because workers wait for the threads that answer them.
    SCHED_IDLE would be too low: on a busy host, a thread suspended while it holds the
    interpreter's lock would block the threads that answer.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
