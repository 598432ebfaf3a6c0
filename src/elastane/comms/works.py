"""What is under way over a group, and whether any of it failed.

torch's own `Work` cannot be asked reliably: some kinds are complete only once they were waited
for, and waiting twice does their last part twice (a reduce-scatter over gloo copies its result
again over what the user has made of it; torch 2.13). So those are waited for through `Waited`,
once. Knows nothing of worlds; fails never itself, it keeps the first failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch.distributed import Work

# So long a wait may last before it is looked whether it is still to last.
_SLICE = timedelta(milliseconds=50)
_ENDED = "the world was ended"
# What was cut ends by itself within this, and then nothing writes into its tensors any more.
_GRACE_S = 0.05


class Waited(Work):
    """A work that is waited for once, and tells `ledger` how that went.

    Its future completes in any case, with `tensors`: an error in it would leave DDP's reducer
    half done. What failed is in the ledger.
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
        """Wait, the first time; a later call returns at once."""
        if self._waited:
            return True
        if self._sliced and self._work.is_completed():
            return self._end()
        self._ledger.count_waiting(1)
        try:
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
        """See how a work went that is over: nobody waits for it."""
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
                    break  # in time or late, well or badly: the next wait says which
        else:
            raise RuntimeError(_ENDED)
        return self._work.wait()

    def _wait_aside(self) -> bool:
        """Wait in another thread: this kind takes no time limit, or would close its connections."""
        waiter = self._ledger.take_waiter()
        try:
            waiter.ask(self._work)
            while not waiter.over.wait(_SLICE.total_seconds()):
                if self._ledger.released.is_set():
                    raise RuntimeError(_ENDED)
        except BaseException:  # A signal's too: its answer is nobody's by now.
            waiter.end()
            raise
        error = waiter.error
        self._ledger.give_back(waiter)
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for, or needs not be."""
        return self._waited or self._work.is_completed()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors; complete when the work has ended, in whatever way."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._ledger.promise(self)
            self._work.get_future().add_done_callback(self._done)
        return self._future

    def release(self) -> None:
        """Complete the future, if nobody has."""
        with self._ledger.lock:
            future = self._future
            if future is not None and not future.done():
                future.set_result(self._tensors)

    def result(self) -> list[torch.Tensor]:
        """The output tensors, where torch keeps them."""
        return self._work.result()

    def _done(self, inner: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            inner.value()
        except RuntimeError as error:
            self._ledger.note(error)
        self._ledger.kept(self)
        self.release()

    def _source_rank(self) -> int:
        return self._work._source_rank()


class Completed(Work):
    """A work that has ended well, with `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is complete."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors


def _tells_its_end(work: Work) -> bool:
    """Whether `is_completed` is True as soon as a work has ended."""
    return isinstance(work, Waited) and work._sliced


class Together(Work):
    """Several works, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all, in turn; the first that failed is told."""
        assert timeout is None, "a bounded wait would close the connections of messages"
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether nobody needs wait: never, a message is complete when it was waited for."""
        return False


class Waiter:
    """A thread that waits for works in another's place, one after the other.

    A thread for each wait was most of what a sharded step cost (`bench in-place`, sharded-step).
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: RuntimeError | None = None
        self._asked: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._run, name="elastane-wait", daemon=True).start()

    def ask(self, work: Work) -> None:
        """Wait for this one; `over` is set when it has ended, and `error` is how."""
        self.over.clear()
        self._asked.put(work)

    def end(self) -> None:
        """Wait for no other, once what is in hand has ended."""
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                work.wait()
                self.error = None
            except RuntimeError as error:
                self.error = error
            del work  # Its tensors are nobody's any more.
            self.over.set()


class WorkLog:
    """The works that nobody has seen the end of, and the first failure; for any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: list[Work] = []
        self._promised: set[Waited] = set()
        # Set when nothing that is under way is to be waited for any longer.
        self.released = threading.Event()
        self.failure: BaseException | None = None
        self._waiting = 0
        self._idle: list[Waiter] = []

    def clear(self) -> None:
        """Forget everything: another world begins."""
        with self.lock:
            self._open = []
            self._promised.clear()
            self.failure = None
            idle, self._idle = self._idle, []
        for waiter in idle:
            waiter.end()
        self.released = threading.Event()

    def take_waiter(self) -> Waiter:
        """Return one that nobody uses."""
        with self.lock:
            return self._idle.pop() if self._idle else Waiter()

    def give_back(self, waiter: Waiter) -> None:
        """Let others use it."""
        waiter.error = None
        with self.lock:
            self._idle.append(waiter)

    def add(self, work: Work) -> None:
        """Remember a work until its end was seen."""
        self.sift()
        with self.lock:
            self._open.append(work)

    def count_waiting(self, more: int) -> None:
        """So many more threads are in a wait than before."""
        with self.lock:
            self._waiting += more

    @property
    def in_flight(self) -> bool:
        """Whether anything has not completed, or is waited for."""
        with self.lock:
            return self._waiting > 0 or any(not work.is_completed() for work in self._open)

    @property
    def is_waited_for(self) -> bool:
        """Whether anything has not completed for certain; narrower than `in_flight`.

        Some kinds, such as a reduce-scatter over gloo, complete only once they are waited for: the
        thread that began one may compute meanwhile.
        """
        with self.lock:
            pending = any(not work.is_completed() for work in self._open if _tells_its_end(work))
            return self._waiting > 0 or bool(self._promised) or pending

    def sift(self) -> None:
        """Let go of works that have completed, noting those that failed."""
        if not self._open:
            return
        with self.lock:
            done = [work for work in self._open if work.is_completed()]
            if done:
                self._open = [work for work in self._open if work not in done]
        for work in done:
            self._settle(work)

    def wait(self) -> None:
        """Wait for all that is open; what fails is noted. On a device, only in its stream."""
        if not self._open:
            return
        with self.lock:
            waiting, self._open = self._open, []
        for work in waiting:
            self._settle(work)

    def promise(self, work: Waited) -> None:
        """Remember that somebody waits for a future."""
        with self.lock:
            self._promised.add(work)

    def kept(self, work: Waited) -> None:
        """Forget a future that completes."""
        with self.lock:
            self._promised.discard(work)

    def releaser(self) -> Callable[[], None]:
        """What lets everybody go who still waits, a moment after the present world was ended.

        A send that meets a closed connection is sometimes queued by gloo and never told of (2.13):
        whoever waits for it would wait for the operation's timeout.
        """
        released = self.released

        def later() -> None:
            time.sleep(_GRACE_S)
            released.set()
            with self.lock:
                waiting = list(self._promised) if self.released is released else []
            for work in waiting:
                work.release()

        return lambda: threading.Thread(target=later, name="elastane-release", daemon=True).start()

    def note(self, error: BaseException) -> None:
        """Remember the first failure."""
        if self.failure is None:
            # Its frames would keep tensors alive.
            self.failure = RuntimeError(str(error))

    def _settle(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self.note(error)
