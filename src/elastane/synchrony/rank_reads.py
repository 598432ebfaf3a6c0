"""Whether a program asks for its rank often enough to notice that rank 0 was lost.

A program that keeps its rank in a variable saves and logs on no worker once rank 0 is lost, and
ends well all the same. Only its questions are seen: it has asked none since the loss, for longer
than it ever went without one. Pure, and never fails.
"""

from __future__ import annotations

from types import FrameType

# A program that has never asked in its steps has this many to do so; one that has asked has more.
STEPS_MIN = 100
# What lies between a question of the script and the group.
_TORCHS = frozenset(("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"))


class RankReads:
    """The questions of a program for its rank, by the number of the step in which they came."""

    def __init__(self) -> None:
        self._asked_at = self._longest = 0
        # The step in which rank 0 was lost; None if the program has asked since, or was warned of.
        self._lost_at: int | None = None

    def asked(self, steps: int) -> None:
        """Record a question, after `steps` steps."""
        self._longest = max(self._longest, steps - self._asked_at)
        self._asked_at = steps
        self._lost_at = None

    def first_lost(self, steps: int) -> None:
        """Record that the worker of rank 0 was lost, after `steps` steps."""
        self._lost_at = steps

    def warning(self, steps: int, *, ends: bool = False) -> str:
        """Return what to warn of, once for each loss; "" if nothing is.

        `ends`: the program has ended, so it will not ask.
        """
        lost_at = self._lost_at
        allowed = 0 if ends else STEPS_MIN + 2 * self._longest
        if lost_at is None or steps - lost_at < allowed:
            return ""
        self._lost_at = None
        return (
            f"the worker of rank 0 was lost {steps - lost_at} steps ago, and the script has not"
            " asked for its rank since. If it keeps the rank in a variable, no"
            " worker saves or logs in its place. Next step: then start it without"
            " --ranks-may-change"
        )


def is_of_script(frame: FrameType | None) -> bool:
    """Whether the script asked, not torch or this package; `frame` called the group's method."""
    while frame is not None and _module(frame) in _TORCHS:
        frame = frame.f_back
    return frame is not None and not _module(frame).startswith(("torch.", "elastane."))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
