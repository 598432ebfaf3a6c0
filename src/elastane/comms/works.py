"""The pending operations of a group, and whether any of them failed.

torch's own `Work` cannot be queried reliably. Some kinds are complete only once they were waited
for, and waiting twice runs their last part twice: a reduce-scatter over gloo copies its result
again over what the user has made of it (torch 2.13). So they are waited for once, through `Waited`.
It does not know worlds, and never fails: it stores the first failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch.distributed import Work

from elastane.process.step_meter import Waiting

# How long a wait lasts before it checks whether to continue.
_SLICE = timedelta(milliseconds=50)
_ENDED = "the world was ended"
# Operations whose connections were cut end within this time, and write no more into their tensors.
_GRACE_S = 0.05


class Waited(Work):
    """A work that is waited for once, and reports the result to `ledger`.

    Its future always completes with `tensors`: an error in it would leave DDP's reducer half done.
    The ledger has the failure.
    """

    def __init__(
        self, work: Work, ledger: WorkLog, tensors: list[torch.Tensor], *, sliced: bool
    ) -> None:
        super().__init__()
        self._work = work
        self._ledger = ledger
        self._tensors = tensors
        self._sliced = sliced
        self._waited = False
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the first call; later calls return at once."""
        if self._waited:
            return True
        if self._sliced and self._work.is_completed():
            return self._end()
        self._ledger.count_waiting(1)
        try:
            with Waiting():
                if timeout:
                    return self._work.wait(timeout)
                return self._wait_sliced() if self._sliced else self._wait_aside()
        except RuntimeError as error:
            self._ledger.note(error)
            raise
        finally:
            self._waited = True
            self._ledger.count_waiting(-1)

    def _end(self) -> bool:
        """Get the result of a work that is over, without waiting."""
        self._waited = True
        try:
            return self._work.wait()
        except RuntimeError as error:
            self._ledger.note(error)
            raise

    def _wait_sliced(self) -> bool:
        while not self._ledger.released.is_set():
            try:
                return self._work.wait(_SLICE)
            except RuntimeError:
                if self._work.is_completed():
                    # completed in time or late, with or without error: the next wait shows which
                    break
        else:
            raise RuntimeError(_ENDED)
        return self._work.wait()

    def _wait_aside(self) -> bool:
        """Wait in another thread: with a timeout, this kind would close its connections."""
        waiter = self._ledger.take_waiter()
        try:
            waiter.ask(self._work)
            while not waiter.over.wait(_SLICE.total_seconds()):
                if self._ledger.released.is_set():
                    raise RuntimeError(_ENDED)
        except BaseException:  # A signal may interrupt it too; then no thread reads the answer.
            waiter.end()
            raise
        error = waiter.error
        self._ledger.give_back(waiter)
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for, or needs no wait."""
        return self._waited or self._work.is_completed()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors; it completes when the work has ended or failed."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._ledger.promise(self)
            self._work.get_future().add_done_callback(self._done)
        return self._future

    def release(self) -> None:
        """Complete the future, unless it is complete."""
        with self._ledger.lock:
            future = self._future
            if future is not None and not future.done():
                future.set_result(self._tensors)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors, if torch keeps them."""
        return self._work.result()

    def _done(self, inner: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            inner.value()
        except RuntimeError as error:
            self._ledger.note(error, unread=True)
        self._ledger.kept(self)
        self.release()

    def _source_rank(self) -> int:
        return self._work._source_rank()


class Completed(Work):
    """A work that has succeeded, with `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a complete future."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors


def _shows_end(work: Work) -> bool:
    """Whether `is_completed` becomes True as soon as the work has ended."""
    return isinstance(work, Waited) and work._sliced


class Together(Work):
    """Several works, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all, in turn; raise the first failure."""
        assert timeout is None, "a bounded wait would close the connections of messages"
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return False: a message is complete only once it was waited for."""
        return False


class Waiter:
    """A thread that waits for works on behalf of others, one after another.

    A new thread for each wait was most of the cost of a sharded step (`bench in-place`,
    sharded-step).
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: RuntimeError | None = None
        self._asked: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._run, name="elastane-wait", daemon=True).start()

    def ask(self, work: Work) -> None:
        """Wait for this work; then `error` is its failure and `over` is set."""
        self.over.clear()
        self._asked.put(work)

    def end(self) -> None:
        """End the thread after the current work."""
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                work.wait()
                self.error = None
            except RuntimeError as error:
                self.error = error
            del work  # Free its tensors.
            self.over.set()


class WorkLog:
    """The works of one world that have not been completed, and the first failure. Thread-safe.

    `refuses`: tells whether an error is torch's refusal of a wrong call. Such an error is not a
    failure of the world. It is kept as `refusal` if no wait of the program has raised it.
    """

    def __init__(self, refuses: Callable[[Exception], bool] = lambda _: False) -> None:
        self._refuses = refuses
        self.refusal: Exception | None = None
        self.lock = threading.RLock()
        self._open: list[Work] = []
        self._promised: set[Waited] = set()
        # Set when waits for pending works have to end.
        self.released = threading.Event()
        self.failure: BaseException | None = None
        self._waiting = 0
        self._idle: list[Waiter] = []
        self._is_closed = False

    def close(self) -> None:
        """Forget the works, since another world begins; futures of them are not completed later.

        The threads that wait for works end: those without one now, the others after theirs.
        """
        with self.lock:
            self._is_closed = True
            self._open = []
            self._promised.clear()
        self._end_idle()

    def _end_idle(self) -> None:
        with self.lock:
            idle, self._idle = self._idle, []
        for waiter in idle:
            waiter.end()

    def take_waiter(self) -> Waiter:
        """Return an unused waiter."""
        with self.lock:
            return self._idle.pop() if self._idle else Waiter()

    def give_back(self, waiter: Waiter) -> None:
        """Return a waiter to the pool."""
        waiter.error = None
        with self.lock:
            self._idle.append(waiter)
        if self._is_closed:
            self._end_idle()

    def add(self, work: Work) -> None:
        """Remember a work until it is complete."""
        self.sift()
        with self.lock:
            self._open.append(work)

    def count_waiting(self, more: int) -> None:
        """Change the number of threads that wait."""
        with self.lock:
            self._waiting += more

    @property
    def in_flight(self) -> bool:
        """Whether any work is incomplete, or is waited for."""
        with self.lock:
            return self._waiting > 0 or any(not work.is_completed() for work in self._open)

    @property
    def is_waited_for(self) -> bool:
        """Whether any work is certainly incomplete; narrower than `in_flight`.

        Some kinds, such as a reduce-scatter over gloo, complete only once they are waited for: the
        thread that began one may compute meanwhile.
        """
        with self.lock:
            pending = any(not work.is_completed() for work in self._open if _shows_end(work))
            return self._waiting > 0 or bool(self._promised) or pending

    def sift(self) -> None:
        """Forget works that have completed, and store the first failure."""
        if not self._open:
            return
        with self.lock:
            done = [work for work in self._open if work.is_completed()]
            if done:
                self._open = [work for work in self._open if work not in done]
        for work in done:
            self._complete(work)

    def wait(self) -> None:
        """Wait for all pending works, and store the first failure; on a device, in its stream."""
        if not self._open:
            return
        with self.lock:
            waiting, self._open = self._open, []
        for work in waiting:
            self._complete(work)

    def promise(self, work: Waited) -> None:
        """Remember that a future is waited for."""
        with self.lock:
            self._promised.add(work)

    def kept(self, work: Waited) -> None:
        """Forget a future that completes."""
        with self.lock:
            self._promised.discard(work)

    def releaser(self) -> Callable[[], None]:
        """Return a function that ends all remaining waits, a moment after the world ended.

        gloo sometimes queues a send on a closed connection and never reports its failure (2.13).
        Without this, a wait for it would last until the operation's timeout.
        """

        def later() -> None:
            time.sleep(_GRACE_S)
            self.released.set()
            with self.lock:
                waiting = list(self._promised)
            for work in waiting:
                work.release()

        return lambda: threading.Thread(target=later, name="elastane-release", daemon=True).start()

    def note(self, error: Exception, *, unread: bool = False) -> None:
        """Store the first failure; `unread`: no wait of the program raises this error."""
        if self._refuses(error):
            self.refusal = RuntimeError(str(error)) if unread else self.refusal
        elif self.failure is None:
            # Its traceback would keep tensors alive.
            self.failure = RuntimeError(str(error))

    def _complete(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self.note(error, unread=True)
