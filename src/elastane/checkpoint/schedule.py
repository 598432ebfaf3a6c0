"""When to save: every N steps, every N seconds, or as often as it pays.

All ranks count steps alike. For intervals of time only rank 0's clock counts. It is asked only at
steps whose number all ranks know (`stride`), so that other steps exchange nothing. `WriteThrottle`
decides which saves storage gets if they come faster than it can write. Pure: clocks are arguments.

"auto" is Young's and Daly's interval, from the measured cost of a save and the job's failures:
J. W. Young, "A first order approximation to the optimum checkpoint interval" (CACM 1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (FGCS 2006), equation 37.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from elastane.errors import CheckpointError, ConfigurationError

# Checkpoints by the clock are no more frequent than this, whatever they cost, ...
INTERVAL_MIN_S = 10.0
# ... and no rarer: estimates of rare events are poor, and an hour is much work to lose.
INTERVAL_MAX_S = 1800.0
# If saves are due more often than storage can take them, writing takes about this share of the
# time. Writing slows the steps (an optimizer's, bound by memory, by an eighth), ...
WRITING_SHARE = 0.0625
# ... but a pause is no longer than this: saves to a slow storage become no rarer.
REST_MAX_S = 10.0
# Before any failure, the assumed time between failures is a day: between the 3 hours of Llama 3's
# 16,384 GPUs and the weeks of one machine.
PRIOR_MTBF_S = 86_400.0
assert INTERVAL_MIN_S < INTERVAL_MAX_S < PRIOR_MTBF_S

# The number of times that rank 0 reads its clock in one interval.
_LOOKS = 16
_STRIDE_MAX = 1 << 20


class SaveInterval(NamedTuple):
    """Seconds from one checkpoint to the next, and the reason in words."""

    seconds: float
    why: str


def mtbf_s(lived_s: float, failures: int) -> float:
    """Estimate the mean time between failures from this experience.

    A prior of one failure in `PRIOR_MTBF_S`, the rate of jobs in general, is included. It
    matters less the longer the job lives.
    """
    return (lived_s + PRIOR_MTBF_S) / (failures + 1)


def interval(cost_s: float, failures: int, lived_s: float, write_s: float = 0.0) -> SaveInterval:
    """Return the interval with the least cost of saving and repeating work together.

    Args:
        cost_s: how long one checkpoint blocks the training, in seconds.
        failures: the number of failures so far.
        lived_s: the time in which they happened, in seconds.
        write_s: how long one checkpoint is written in the background, in seconds. Writing takes at
            most half of the time.

    """
    mtbf = mtbf_s(lived_s, failures)
    best = _daly(max(cost_s, 1e-6), mtbf)
    why = f"a save costs {_spell(cost_s)} of training, and something fails every {_spell(mtbf)}"
    least = max(INTERVAL_MIN_S, 2 * write_s)
    if best < least and least > INTERVAL_MIN_S:
        return SaveInterval(least, f"twice the {_spell(write_s)} that one takes to be written out")
    if best < least:
        return SaveInterval(least, f"{why}; {_spell(least)} is the least")
    most = max(INTERVAL_MAX_S, least)
    if best > most:
        return SaveInterval(most, f"{why}; {_spell(most)} is the most")
    return SaveInterval(best, why)


def rest_s(write_s: float) -> float:
    """Return how long storage rests after a write that took `write_s`, in seconds.

    See docs/decisions/write-throttle.md.
    """
    return min(write_s * (1 / WRITING_SHARE - 1), REST_MAX_S)


def _daly(cost_s: float, mtbf: float) -> float:
    if cost_s >= 2 * mtbf:
        return mtbf
    ratio = cost_s / (2 * mtbf)
    return math.sqrt(2 * cost_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _spell(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1000:.3g} ms"


class SaveSchedule:
    """The save interval of one rank; `stride` is equal on all ranks after the same steps.

    `report` gets the first interval that was computed from a measured cost, in words.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | Literal["auto"] | None,
        clock: Callable[[], float],
        report: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._every_steps = _positive("every_steps", every_steps, Integral)
        self._every_s = every_s if every_s == "auto" else _positive("every_s", every_s)
        self._clock = clock
        self._report = report
        self.stride = 1
        self.failures = 0
        self._lived_s = 0.0  # Before this process.
        self._began_s = self._saved_s = clock()
        self._looked: tuple[int, float] | None = None
        self._cost_s = self._write_s = 0.0
        self._why = ""

    def is_due(self, step: int) -> str:
        """Return why a save may be due at this step, equal on all ranks, or ""."""
        if self._every_steps and step and step % self._every_steps == 0:
            return "step"
        return "time" if self._every_s is not None and step % self.stride == 0 else ""

    def word(self, step: int, reason: str) -> int:
        """Return the decision of rank 0: the next stride in steps, negative if it does not save."""
        now_s = self._clock()
        stride = self.stride
        if self._every_s is not None:
            stride = self._next_stride(step, now_s)
        due = reason != "time" or now_s - self._saved_s >= self.interval_s()
        return stride if due else -stride

    def accept(self, word: int) -> bool:
        """Apply the `word` of rank 0 on this rank; returns whether to save."""
        self.stride = max(1, abs(word))
        if word > 0:
            self._saved_s = self._clock()
        return word > 0

    def add_cost(self, blocked_s: float, write_s: float) -> None:
        """Record how long a save blocked the training, and how long one was written, in seconds."""
        self._cost_s = blocked_s if not self._cost_s else 0.7 * self._cost_s + 0.3 * blocked_s
        self._write_s = max(write_s, 0.7 * self._write_s)

    def add_failure(self) -> None:
        """Record that the run was interrupted."""
        self.failures += 1

    @property
    def lived_s(self) -> float:
        """The training time of the job in seconds, in this process and before."""
        return self._lived_s + self._clock() - self._began_s

    def resume(self, lived_s: float, failures: int, stride: int) -> None:
        """Continue from the values of a restored run, or of another member."""
        self._lived_s = lived_s
        self._began_s = self._clock()
        self.failures = failures
        self.stride = max(1, stride)

    def interval_s(self) -> float:
        """Return the time between saves in seconds; infinite without a time interval."""
        if self._every_s != "auto":
            return self._every_s or math.inf
        return self._auto_s()

    def _auto_s(self) -> float:
        seconds, why = interval(self._cost_s, self.failures, self.lived_s, self._write_s)
        spoken = f"a checkpoint each {seconds:.0f} s: {why}"
        if self._cost_s and not self._why:
            self._report(spoken)
        self._why = spoken if self._cost_s else ""
        return seconds

    def _next_stride(self, step: int, now_s: float) -> int:
        """Return a power of two of steps that takes a small part of the interval."""
        before, self._looked = self._looked, (step, now_s)
        if before is None or step <= before[0]:
            return self.stride
        step_s = max(1e-6, (now_s - before[1]) / (step - before[0]))
        wanted = self.interval_s() / _LOOKS / step_s
        return int(min(_STRIDE_MAX, 2 ** max(0, math.floor(math.log2(max(1.0, wanted))))))


class WriteThrottle:
    """Lets storage rest if saves come faster than it writes; one for each rank.

    Why: docs/decisions/write-throttle.md.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._until_s = 0.0
        self._fence: tuple[int, int] | None = None

    def rests(self, fence: tuple[int, int], *, busy: bool) -> bool:
        """Return whether a due save stays in memory; `busy`: storage is writing.

        The first save of a world never does: the node-local folder of an arrival holds nothing.
        """
        now_s = self._clock()
        if busy:  # Extended at each sighting, since saves may be rare.
            self._until_s = now_s + rest_s(now_s - self._began_s)
        return now_s < self._until_s and fence == self._fence

    def begun(self, fence: tuple[int, int]) -> None:
        """Record that a save of this round and attempt goes to storage now."""
        self._began_s = self._clock()
        self._until_s = 0.0
        self._fence = fence


def _positive(name: str, value: Any, kind: type[Real] | type[Integral] = Real) -> Any:
    fits = type(value) is not bool and isinstance(value, kind) and float(value) > 0
    if value is not None and not fits:
        raise ConfigurationError(
            f"{name} is {value!r}",
            expected="a whole number of at least 1, or None"
            if kind is Integral
            else 'more than 0, or None, or "auto"',
            next_step="Checkpointer(where, every_steps=500) or every_s=600",
            slug="checkpoint-interval",
        )
    return value


def steps_done(step: Any) -> int:
    """Return the user's number of finished steps; raises CheckpointError for anything else."""
    try:
        number = operator.index(step)  # Accepts NumPy's integers and integer tensors.
    except TypeError:
        number = -1
    if number < 0:
        raise not_a_step(step)
    return number


def not_a_step(step: Any) -> CheckpointError:
    """Return the error for a step that cannot be saved."""
    return CheckpointError(
        f"step {step!r} has not happened",
        expected="a step that was committed, or how many steps are done, from 1",
        next_step="call it after the body of the step",
        slug="checkpoint-step",
    )


def at_least_one(keep: int) -> int:
    """Check `keep`; raises ConfigurationError below 1."""
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError(
            f"keep is {keep!r}",
            expected="how many checkpoints are left, at least 1",
            next_step="Checkpointer(where, keep=3)",
            slug="checkpoint-interval",
        )
    return keep
