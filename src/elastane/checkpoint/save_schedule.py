"""When to save: each so many steps, each so many seconds, or as often as pays.

Steps are counted alike on all ranks; of time rank 0's clock is believed, and asked for it only at
steps whose number all ranks know (`stride`), so that between them nothing is exchanged. "auto" is
Young's and Daly's interval, from what a save has cost and how often the job has failed. Of saves
that come more often than storage takes them, `SaveInterval` says which it is given.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal

from elastane.checkpoint.interval import interval, rest_s
from elastane.errors import CheckpointError, ConfigurationError

_log = logging.getLogger("elastane.checkpoint")
# Rank 0 looks at its clock so many times in an interval.
_LOOKS = 16
_STRIDE_MAX = 1 << 20


class Cadence:
    """One rank's; `stride` is the same on all ranks that made the same steps."""

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | Literal["auto"] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = _positive("every_steps", every_steps, Integral)
        self._every_s = every_s if every_s == "auto" else _positive("every_s", every_s)
        self._clock = clock
        self.stride = 1
        self.failures = 0
        self._lived_s = 0.0  # before this process
        self._began_s = self._saved_s = clock()
        self._looked: tuple[int, float] | None = None
        self._cost_s = self._write_s = 0.0
        self._why = ""

    def is_due(self, step: int) -> str:
        """Return why a save may be due at this step, the same on all ranks; "" where it is not."""
        if self._every_steps and step and step % self._every_steps == 0:
            return "step"
        return "time" if self._every_s is not None and step % self.stride == 0 else ""

    def word(self, step: int, reason: str) -> int:
        """Return rank 0's word on it: the next stride, negative where nothing is to be saved."""
        now_s = self._clock()
        stride = self.stride
        if self._every_s is not None:
            stride = self._next_stride(step, now_s)
        due = reason != "time" or now_s - self._saved_s >= self.interval_s()
        return stride if due else -stride

    def hear(self, word: int, step: int) -> bool:
        """Take in rank 0's word; returns whether to save."""
        self.stride = max(1, abs(word))
        if word > 0:
            self._saved_s = self._clock()
        return word > 0

    def cost(self, blocked_s: float, write_s: float) -> None:
        """Take in for how long a save held up the training, and how long one was written."""
        self._cost_s = blocked_s if not self._cost_s else 0.7 * self._cost_s + 0.3 * blocked_s
        self._write_s = max(write_s, 0.7 * self._write_s)

    @property
    def lived_s(self) -> float:
        """For how long the job has trained, in this process and before."""
        return self._lived_s + self._clock() - self._began_s

    def go_on(self, lived_s: float, failures: int, stride: int) -> None:
        """Take over what was so far: of the run that was restored, or of another member."""
        self._lived_s, self._began_s = lived_s, self._clock()
        self.failures, self.stride = failures, max(1, stride)

    def interval_s(self) -> float:
        """Return how far apart saves by time are to be."""
        if self._every_s != "auto":
            return self._every_s or math.inf
        return self._auto_s()

    def _auto_s(self) -> float:
        seconds, why = interval(self._cost_s, self.failures, self.lived_s, self._write_s)
        spoken = f"a checkpoint each {seconds:.0f} s: {why}"
        if self._cost_s and not self._why:
            _log.info("%s", spoken)
        self._why = spoken if self._cost_s else ""
        return seconds

    def _next_stride(self, step: int, now_s: float) -> int:
        """Return a power of two of steps that take a small part of the interval."""
        before, self._looked = self._looked, (step, now_s)
        if before is None or step <= before[0]:
            return self.stride
        step_s = max(1e-6, (now_s - before[1]) / (step - before[0]))
        wanted = self.interval_s() / _LOOKS / step_s
        return int(min(_STRIDE_MAX, 2 ** max(0, math.floor(math.log2(max(1.0, wanted))))))


class SaveInterval:
    """One rank's: for how long storage rests that saves outpace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._until_s = 0.0
        self._fence: tuple[int, int] | None = None

    def rests(self, fence: tuple[int, int], *, busy: bool) -> bool:
        """Tell whether a save that is due now stays in memory; `busy`: storage is at work.

        Not the first of a world: of folders that are a node's own, an arrival's holds nothing.
        """
        now_s = self._clock()
        if busy:  # From when it was seen so last: saves may be rare.
            self._until_s = now_s + rest_s(now_s - self._began_s)
        return now_s < self._until_s and fence == self._fence

    def begun(self, fence: tuple[int, int]) -> None:
        """A save of this round and attempt goes to storage now."""
        self._began_s, self._until_s, self._fence = self._clock(), 0.0, fence


def _positive(name: str, value: Any, kind: type[Real] | type[Integral] = Real) -> Any:
    fits = type(value) is not bool and isinstance(value, kind) and float(value) > 0
    if value is not None and not fits:
        raise ConfigurationError(
            f"{name} is {value!r}",
            expected="a whole number of at least 1, or None"
            if kind is Integral
            else 'more than 0, or None, or "auto"',
            next_step="Checkpointer(where, every_steps=500) or every_s=600",
            slug="checkpoint-cadence",
        )
    return value


def steps_done(step: Any) -> int:
    """Return how many steps a user says are done; CheckpointError for what is no such number."""
    try:
        number = operator.index(step)  # also NumPy's, and those in tensors
    except TypeError:
        number = -1
    if number < 0:
        raise not_a_step(step)
    return number


def not_a_step(step: Any) -> CheckpointError:
    """Return the error for a step after which nothing can be saved."""
    return CheckpointError(
        f"step {step!r} has not happened",
        expected="a step that was committed, or how many steps are done, from 1",
        next_step="call it behind the body of the step",
        slug="checkpoint-step",
    )


def at_least_one(keep: int) -> int:
    """Return how many checkpoints are kept; ConfigurationError where that is none."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(
            f"keep is {keep!r}",
            expected="how many checkpoints are left, at least 1",
            next_step="Checkpointer(where, keep=3)",
            slug="checkpoint-cadence",
        )
    return keep
