"""Whether a program divides by a world size that it asked for before the world shrank.

Under --ranks-may-change a program divides the sums that it makes itself, and multiplies losses by
its size over a summed count of samples or tokens. With an old size, every gradient is too small or
too large from then on, and replicas stay equal. Only its questions for the size are seen, so a
program that has not asked since may have kept it. Pure, and never fails.
"""

from __future__ import annotations

from enum import Enum


class OwnSum(Enum):
    """What a sum that the program makes itself may be to its gradients."""

    NOTHING = "nothing, as far as it shows"
    GRADIENTS = "gradients, or all that a program without DistributedDataParallel sums"
    # The loss may be divided by it, and multiplied by the size, before the backward pass.
    COUNT = "a count of samples or tokens"


class SizeReads:
    """The questions of a program for its world size, and its sums without one."""

    def __init__(self) -> None:
        # Whether the program sees another world than when it asked last.
        self._has_changed = False
        self._unasked: set[OwnSum] = set()
        # Whether the world changed within a count that is not asked for yet, and whether the
        # program has gone on to its next forward since: a loss may be over it by now.
        self._is_interrupted = self._is_used = False

    def asked(self) -> None:
        """Record a question of the script."""
        if not self._is_used:
            self._has_changed = self._is_interrupted = False
            self._unasked.clear()

    def changed(self) -> None:
        """Record that the program sees another world."""
        self._has_changed = True

    def interrupted_count(self) -> None:
        """Record that it has seen another world as a count returned.

        What it asked before that sum is of the world before.
        """
        self._is_interrupted = True
        self.summed(OwnSum.COUNT)

    def summed(self, what: OwnSum) -> None:
        """Record that the program has begun a sum."""
        if self._has_changed and what is not OwnSum.NOTHING:
            self._unasked.add(what)

    def begun_pass(self) -> None:
        """Record that the program begins a forward."""
        self._is_used = self._is_used or self._is_interrupted

    def why_not_reduced(self) -> str:
        """Return why the gradients of a backward pass may be wrong; "" if nothing shows it."""
        return self._why(OwnSum.COUNT)

    def why_not_updated(self) -> str:
        """Return why an update may be wrong; "" if nothing shows it."""
        return self._why(OwnSum.COUNT) or self._why(OwnSum.GRADIENTS)

    def _why(self, what: OwnSum) -> str:
        if what not in self._unasked:
            return ""
        sums = "gradients" if what is OwnSum.GRADIENTS else "counts"
        return (
            f"the script sums {sums} itself, and has not asked for the world size"
            " between the world's change and its use; it may divide by the size before"
        )
