"""What a keeper does when the host has nothing better to do: digests, and giving memory back.

Threads of low priority, so that they leave the training alone. A task that fails is our bug,
and is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable

from elastane.protocol.checkpoints import CHUNK_BYTES, chunks_of
from elastane.snapshots.shared_memory import viewed
from elastane.snapshots.writing import Source

_log = logging.getLogger("elastane.snapshots")
# A tenth of a processor, where the training wants all of them.
_NICE = 10


class Background:
    """Runs tasks one after the other, for at most this share of the time."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="keeper-idle", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def do(self, task: Callable[[], None]) -> None:
        """Have a task done by and by."""
        self._tasks.put(task)

    def _work(self) -> None:
        step_back()
        while True:
            task = self._tasks.get()
            began_s = time.monotonic()
            try:
                task()
            except Exception:
                _log.exception("a task in the background failed")
            del task  # It may hold descriptors' owners.
            time.sleep((time.monotonic() - began_s) * (1 / self._share - 1))


def step_back() -> None:
    """Give the calling thread, and those that it starts, a low priority.

    Not the process: workers wait for the threads that answer. Not SCHED_IDLE: on a busy host one
    that was put off while it held the interpreter's lock would hold up those that answer, too.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def digests_of(
    sources: Iterable[Source], wanted: Callable[[], bool], threads: int = 1
) -> tuple[str, ...] | None:
    """Return the digest of each source's bytes; None where they are not wanted any more.

    0.10 s of processor time for a GB, of which mapping the pages is two thirds.
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
    """The chunks of one view, which threads take one by one."""

    def __init__(self, view: memoryview, wanted: Callable[[], bool]) -> None:
        self._view, self._wanted = view, wanted
        self._left = iter(range(0, len(view), CHUNK_BYTES))
        self._digests: dict[int, str] = {}
        self._failure: BaseException | None = None

    def digests(self, threads: int) -> str | None:
        """Return the digest of all chunks' digests."""
        # Not before: a keeper that holds nothing does without what storage needs. And not from
        # `elastane.storage.digest`: two threads that import a package and a part of it at the same
        # time, one from above and one from below, may wait for each other.
        from elastane.storage import digest

        digest_of = digest.digest_of

        helpers = [
            threading.Thread(target=self._take, args=(digest_of,), daemon=True)
            for _ in range(min(threads, chunks_of(len(self._view))) - 1)
        ]
        for helper in helpers:
            helper.start()
        self._take(digest_of)
        for helper in helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        if len(self._digests) != chunks_of(len(self._view)):
            return None
        return digest_of([digest.encode() for _, digest in sorted(self._digests.items())])

    def _take(self, digest_of: Callable[[Iterable[memoryview]], str]) -> None:
        try:
            while self._failure is None and self._wanted():
                at = next(self._left, None)
                if at is None:
                    return
                self._digests[at] = digest_of([self._view[at : at + CHUNK_BYTES]])
        except BaseException as error:  # told in the thread that asked
            self._failure = error
