"""Operations that are issued and not delivered, and the works that the program holds of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.distributed import Work

from elastane.comms.elastic import SLICED
from elastane.comms.group import WorldGroup
from elastane.comms.untraced import skipped
from elastane.comms.works import Waited, WorkLog
from elastane.synchrony import callsites
from elastane.synchrony.calls import Call
from elastane.synchrony.contributions import Contribution, Copied, Gradients, overwrite
from elastane.synchrony.rules import RefusedCall, Start

T = TypeVar("T")

# The types of errors that torch raises for a wrong call, by name.
_REFUSALS = {e.__name__: e for e in (RuntimeError, ValueError, TypeError, NotImplementedError)}


class Reader(Protocol):
    """The program's group, as far as its reads of results concern it."""

    def has_waited(self, *numbers: int) -> None:
        """Record that the program waits, or has waited, for these operations together."""

    def seeing(self, number: int) -> AbstractContextManager[None]:
        """Show this thread the members that are visible once an operation was waited for."""


class PendingOperation:
    """One operation, from its issue to its delivery; its owner serialises all but `wait`."""

    def __init__(self, number: int, call: Call, contribution: Contribution) -> None:
        self.number = number
        self.call = call
        self.contribution = contribution
        self.over = threading.Event()
        # Why torch itself refuses the call, such as for a type that gloo cannot sum; the program
        # gets this error, as without elastane: from the call, or from the wait.
        self.refusal: Exception | None = None
        self.is_refused_at_call = False
        self._work: Waited | None = None
        self._failure: Exception | None = None
        self._future: OrderedFuture[list[torch.Tensor]] | None = None
        # The number of members that its sum counts for, and the number whose sum it is.
        self._counts_for = self._is_of = 0

    def prepare(self, start: Start) -> None:
        """Put its contribution into its tensors, scaled for this start."""
        if self.call.signature.is_scaled:
            self._counts_for, self._is_of = start.divided_by, start.divisor
            if start.is_repeated:
                self.contribution.restore(0, 0)
        elif start.is_repeated or start.divided_by != start.divisor:
            self.contribution.restore(start.divided_by, start.divisor)

    def begin(self, world: WorldGroup, root: int | None, log: WorkLog) -> None:
        """Start it in `world`; a failure is raised by `wait`."""
        self._work = self._failure = self.refusal = None
        self.is_refused_at_call = False
        try:
            work = self.call.begin(world.group, root)
        except Exception as error:
            if world.refuses(error):
                self.refusal, self.is_refused_at_call = error.with_traceback(None), True
                return
            if not world.aborted:
                log.note(error)
            self._failure = error.with_traceback(None)
            return
        sliced = self.call.signature.kind in SLICED
        self._work = Waited(work, log, list(self.call.outputs), sliced=sliced)

    def wait(self, world: WorldGroup) -> None:
        """Wait until it has completed in `world`, or is refused; raises an error if that ends."""
        if self._failure is not None:
            raise self._failure
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            if not world.refuses(error):
                raise
            self.refusal = error.with_traceback(None)

    def refuse(self, refusal: RefusedCall) -> None:
        """Take the refusal of another member, whose call was the same."""
        self.refusal = _REFUSALS.get(refusal.kind, RuntimeError)(refusal.text)
        self.is_refused_at_call = refusal.is_at_call

    def refused_call(self) -> RefusedCall | None:
        """Return its refusal in the form that other members receive; None if torch accepts it."""
        if self.refusal is None:
            return None
        return RefusedCall(type(self.refusal).__name__, str(self.refusal), self.is_refused_at_call)

    def gathers(self, rank: int, size: int, lost: Sequence[int]) -> bool:
        """Whether the sum that is to be scaled gathers a slice of each rank, with zeros elsewhere.

        `rank` of `size`: this member's, as the program sees it. `lost`: the ranks without a member.
        The slice of this member is in the sum as it has given it, and those of lost ranks are zero.
        """
        if self._counts_for == self._is_of or not isinstance(self.contribution, Copied):
            return False
        others = [each for each in range(size) if each != rank]
        for own, total in zip(self.contribution.copies, self.call.outputs, strict=True):
            if not own.numel() or own.numel() % size:
                return False
            given, sums = own.reshape(size, -1), total.detach().reshape(size, -1)
            if given[others].any() or sums[[*lost]].any() or not given[rank].any():
                return False
            if not torch.equal(given[rank], sums[rank]):
                return False
        return True

    def scale_sum(self) -> None:
        """Scale its sum, which has completed, to the number of members that it counts for.

        Scripts put counts into sums of floats and read them by int(). If all parts are 7, the sum
        of three for four is 28. Scaled before the sum, as doubles, they gave 27.999.., so 27.
        """
        if self._counts_for == self._is_of:
            return
        for output in self.call.outputs:
            wide = output.detach().to(torch.promote_types(output.dtype, torch.float64))
            scaled = wide * self._counts_for / self._is_of
            is_whole = not (output.is_floating_point() or output.is_complex())
            overwrite(output, scaled.round() if is_whole else scaled)

    def accept(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the result of another member."""
        for output, tensor in zip(self.call.outputs, tensors, strict=True):
            overwrite(output, tensor)

    def result(self) -> list[torch.Tensor]:
        """Return the result as this member keeps it for others.

        The bucket of a reducer holds it until the next backward pass, which waits for all members.
        Other tensors belong to the program, which may change them.
        """
        if isinstance(self.contribution, Gradients):
            return list(self.call.outputs)
        return [tensor.detach().clone() for tensor in self.call.outputs]

    def future(self, reader: Reader) -> OrderedFuture[list[torch.Tensor]]:
        """Return the future of its result; the owner's lock is held."""
        if self._future is None:
            self._future = OrderedFuture((self.number,), reader)
            if self.over.is_set():
                self._settle(self._future)
        return self._future

    def finish(self) -> None:
        """Return the result, or the refusal, to the program; the owner's lock is held."""
        self.over.set()
        if self._future is not None:
            self._settle(self._future)

    def _settle(self, future: OrderedFuture[list[torch.Tensor]]) -> None:
        if self.refusal is None:
            future.set_result(list(self.call.outputs))
        else:
            future.set_exception(self.refusal)  # type: ignore[arg-type]  # torch means an exception


class OrderedFuture(torch.futures.Future[T]):
    """The future of operations, or of what a callback makes of their result.

    A wait for it counts as one for the operations. Its callbacks run in the thread that delivers,
    when the program may still see an older world: they see the members whose result they get.
    """

    def __init__(self, numbers: Sequence[int], reader: Reader) -> None:
        super().__init__()
        self._numbers = numbers
        self._reader = reader

    @classmethod
    def of_all(
        cls, futures: Iterable[torch.futures.Future[Any]], collected: torch.futures.Future[Any]
    ) -> torch.futures.Future[Any]:
        """Return `collected`, which is done once all `futures` are, as a wait for all of them."""
        ours = [each for each in futures if isinstance(each, OrderedFuture)]
        if not ours:
            return collected
        numbers = sorted({number for each in ours for number in each._numbers})
        made: OrderedFuture[Any] = OrderedFuture(numbers, ours[0]._reader)
        collected.add_done_callback(made._take)
        return made

    @skipped
    def wait(self) -> T:
        """Wait until they are delivered, over any number of faults; return the value."""
        value = super().wait()
        self._reader.has_waited(*self._numbers)
        return value

    def then(self, callback: Callable[[torch.futures.Future[T]], Any]) -> OrderedFuture[Any]:
        """Return the future of what `callback` returns.

        A backward pass waits for the futures of communication hooks, in C++. So its end is a wait
        for each of them.
        """
        made: OrderedFuture[Any] = OrderedFuture(self._numbers, self._reader)
        super().then(self._with_members(callback)).add_done_callback(made._take)
        if callsites.is_in_backward():
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(made.wait)
        return made

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call `callback` with a future of the same value, once it is there."""
        super().add_done_callback(self._with_members(callback))

    def _with_members(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(done: Any) -> Any:
            with self._reader.seeing(max(self._numbers)):
                return callback(done)

        return called

    def _take(self, done: torch.futures.Future[T]) -> None:
        try:
            value = done.value()
        except Exception as error:  # What a callback of the program raises, its wait raises.
            self.set_exception(error)  # type: ignore[arg-type]  # torch means an exception
        else:
            self.set_result(value)


class OrderedWork(Work):
    """The program's hold on an operation; it fails only if torch refuses the call."""

    def __init__(
        self, pending: PendingOperation, lock: threading.Condition, reader: Reader
    ) -> None:
        super().__init__()
        self._pending = pending
        self._lock = lock
        self._reader = reader

    @skipped
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is delivered, over any number of faults."""
        self._pending.over.wait()
        self._reader.has_waited(self._pending.number)
        if self._pending.refusal is not None:
            raise self._pending.refusal
        return True

    @skipped
    def is_completed(self) -> bool:
        """Whether the operation is delivered."""
        return self._pending.over.is_set()

    @skipped
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of its tensors."""
        with self._lock:
            return self._pending.future(self._reader)

    @skipped
    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return list(self._pending.call.outputs)


class RestartingWork(Work):
    """A message between two members: if it fails, all workers restart."""

    def __init__(self, work: Work, restart: Callable[[str], NoReturn], name: str) -> None:
        super().__init__()
        self._work = work
        self._restart = restart
        self._name = name

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message."""
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            self._restart(f"torch.distributed.{self._name} failed: {error}")

    def is_completed(self) -> bool:
        """Whether the message has arrived."""
        return self._work.is_completed()
