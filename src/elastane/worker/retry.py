"""Collectives outside of steps that survive the loss of a peer: `job.retry(function, ...)`.

The members of a world call it at the same place of the program. When a peer is lost, the survivors
enter the next world, compare their state and run the function again. A barrier ends each call. A
member that passed it knows that all members have run the function to its end. So if one survivor
has passed the barrier of a call, the others return their own values; otherwise all run the function
again. No value travels between survivors.

A worker that joins meanwhile takes no part in a call after a step, since it never runs that body.
The others continue without it, in a group of their own, until their loop asks for the next step
(`Worlds.narrow`). A joining worker reaches a call between two loops itself, so it takes part. Calls
of earlier loops return the others' values to it, which arrive with the state.

Fails with JobError for a wrong use. An exception of the function that no lost peer explains is
raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state import flatten
from elastane.data.position import JobPosition
from elastane.errors import ConfigurationError, JobError, StateError
from elastane.worker.healing import gathered
from elastane.worker.undo import Undo

# Values of calls between loops are kept for joining workers: enough for one in each epoch.
VALUES_MAX = 10_000
VALUE_BYTES_MAX = 4096

_AFTER_A_STEP, _BETWEEN_LOOPS = 1, 2
# (kind, steps committed, number after the step) or (kind, loops ended, number since then). Three
# zeros are no call.
Place: TypeAlias = tuple[int, int, int]
_NO_CALL: Place = (0, 0, 0)
SLUG = "job-given-up"


class Before:
    """What a function may change besides parameters, as it was before the call."""

    def __init__(self, tracked: RegisteredObjects, group: ElasticGroup) -> None:
        self._undo = Undo(tracked)
        self._undo.begin()
        roots: list[torch.nn.Module] = [*tracked.modules, *group.ddps]
        self._modes = [(each, each.training) for root in roots for each in root.modules()]

    def restore(self) -> None:
        """Restore random streams, buffers, settings, gradients, and train or eval mode."""
        self._undo.restore()
        for module, training in self._modes:
            module.training = training


@dataclass
class RetriedCall:
    """A call in progress. `ran`: the function has completed in this world and returned `value`.

    `before` is what the function may have changed. `is_over`: all members have run it.
    """

    place: Place
    before: Before | None = None
    ran: bool = False
    value: Any = None
    is_over: bool = False

    def begin_run(self, before: Before) -> None:
        """Record what the function may change, before it runs."""
        self.before = before

    def run(self, function: Callable[[], Any]) -> None:
        """Run the function in the current world, and keep its value."""
        self.ran = False
        self.value = function()
        self.ran = True

    def finish(self) -> None:
        """Record that all members have run the function."""
        self.is_over = True

    @property
    def is_between_loops(self) -> bool:
        """Whether a joining worker reaches this call itself."""
        return self.place[0] == _BETWEEN_LOOPS


class Calls:
    """The calls of one member; `meet` is a collective of a world's members."""

    def __init__(self, group: ElasticGroup) -> None:
        self._group = group
        self.call: RetriedCall | None = None
        self._where: Literal["nowhere", "step", "after", "between"] = "nowhere"
        self._loops = 0
        self._number = 0  # number of the next call after this step, or since the last loop ended
        self._done: Place = _NO_CALL
        self._completed: Place = _NO_CALL  # between loops, by any member
        self._values: dict[str, Any] = {}
        self._received: list[list[int]] = []

    def in_step(self) -> None:
        """Record that a body begins."""
        self._where = "step"

    def after_step(self) -> None:
        """Record that a step is yielded, or that its body has ended."""
        self._where = "after"
        self._number = 0

    def loop_ended(self) -> None:
        """Record that the script leaves a loop of steps."""
        self._where = "between"
        self._number = 0
        self._loops += 1

    def begin(self, name: str, steps: int) -> RetriedCall:
        """Begin a call; JobError at a place where no call is allowed."""
        if self.call is not None:
            raise _misplaced(f"job.retry({name}) inside of another job.retry()")
        if self._where == "step":
            raise _misplaced(f"job.retry({name}) inside of `with step:`, which is retried itself")
        if self._where == "nowhere":
            raise _misplaced(f"job.retry({name}) before the first job.steps()")
        between = self._where == "between"
        place = (
            (_BETWEEN_LOOPS, self._loops, self._number)
            if between
            else (_AFTER_A_STEP, steps, self._number)
        )
        self._number += 1
        if between and place <= self._completed:
            return RetriedCall(place, value=self._value_of(name, place), is_over=True)
        self.call = RetriedCall(place)
        return self.call

    def end(self) -> None:
        """End the current call, with a value or an exception."""
        self.call = None

    def complete(self, call: RetriedCall) -> None:
        """Record that all members have run the function of this call to its end."""
        assert call.ran, "a barrier was passed that this member had not reached"
        call.finish()
        self._done = call.place
        if not call.is_between_loops:
            return
        self._completed = call.place
        if _is_small(call.value) and len(self._values) < VALUES_MAX:
            self._values[_key(call.place)] = call.value

    def encoded(self) -> list[int]:
        """Return the current call and the last completed one, as the members exchange them."""
        return [*(self.call.place if self.call is not None else _NO_CALL), *self._done]

    def meet(self) -> None:
        """Exchange calls with the members of this world, and learn which are completed."""
        call = self.call
        self._received = gathered(self._group, self.encoded())
        if call is None:
            return
        if any((*each[3:],) == call.place for each in self._received):
            self.complete(call)
        elif call.before is not None:
            call.before.restore()

    def callers(self) -> list[int]:
        """Return the ranks that were in the current call at the exchange."""
        assert self.call is not None, "callers() outside of a call"
        return [r for r, each in enumerate(self._received) if (*each[:3],) == self.call.place]

    def state_dict(self) -> dict[str, Any]:
        """Return what a joining worker has to know."""
        return {"completed": list(self._completed), "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept another member's completed calls and their values."""
        kind, loops, number = state["completed"]
        self._completed = (kind, loops, number)
        self._values = dict(state["values"])

    def _value_of(self, name: str, place: Place) -> Any:
        if _key(place) not in self._values:
            raise JobError(
                f"job.retry({name}) of before this worker joined gave a value that is not kept",
                expected=f"a value of at most {VALUE_BYTES_MAX} bytes, of numbers, text, tensors,"
                f" lists and dicts, in one of the first {VALUES_MAX} calls",
                next_step="return numbers, or call it after the `with` of a step",
                slug="job-retry",
            )
        return self._values[_key(place)]


class RetryProgress:
    """How far a member is: its position in the data and its calls, as one state."""

    def __init__(self, cursor: JobPosition, calls: Calls) -> None:
        self._cursor = cursor
        self._calls = calls

    @property
    def next_step(self) -> int:
        """The number of the next step."""
        return self._cursor.next_step

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the calls."""
        return {"cursor": self._cursor.state_dict(), "calls": self._calls.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept another member's."""
        self._cursor.load_state_dict(state["cursor"])
        self._calls.load_state_dict(state["calls"])


def given_up(error: BaseException, where: str, steps: int, resumes: str) -> str:
    """Describe an error outside of every guarded place that ends a worker, and what is lost."""
    said = str(error).partition("\n")[0]
    return (
        f"elastane: {where}: {type(error).__name__}: {said}\n"
        f"elastane: a collective outside of `with step:` and job.retry() lost a peer. This worker"
        f" ends, and gives up its state after {steps} steps. If other workers still hold that"
        f" state, its replacement gets it from them; else the job continues from {resumes}."
        f" Next step: put the call into job.retry(function, ...) [{SLUG}]\n"
    )


def _key(place: Place) -> str:
    return ".".join(map(str, place))


def _is_small(value: Any) -> bool:
    """Whether a value is small enough to keep for joining workers."""
    try:
        parts = flatten(value)
    except (ConfigurationError, StateError):
        return False
    return len(parts.tree) + sum(each.nbytes for each in parts.tensors) <= VALUE_BYTES_MAX


def _misplaced(what: str) -> JobError:
    return JobError(
        what,
        expected="a call after the `with` of a step, or between two loops of job.steps(), by all"
        " workers at the same place",
        next_step="for step, batch in job.steps(...):  with step: ...;  job.retry(validate, model)",
        slug="job-retry",
    )
