"""Whether an evaluation of a script takes a ratio of two sums over different numbers of workers.

A script that sees its first world size gets its sums of floats scaled to it, since it may divide
them by that size. Sums of many integers in an evaluation are counts of classes, and are exact: they
would be rounded. So a ratio of both, such as the mean loss of each class, would be too large by the
first size over the number of survivors. Pure, and never fails.
"""

from __future__ import annotations

from elastane.synchrony.operations import Signature


class EvaluationSums:
    """The sums of one evaluation; a sum of floats and one of as many counts make a ratio."""

    def __init__(self) -> None:
        self._scaled: set[int] = set()
        self._exact: set[int] = set()

    def left(self) -> None:
        """Record that the program is not in an evaluation."""
        self._scaled.clear()
        self._exact.clear()

    def why_not_summed(self, signature: Signature, *, is_smaller: bool) -> str:
        """Record a sum that the program begins; return why a ratio with it is wrong, or "".

        `is_smaller`: the world has fewer members than the program sees.
        """
        if signature.is_exact_tally:
            self._exact.add(signature.elements)
        elif signature.is_scaled and not signature.counts:
            self._scaled.add(signature.elements)
        else:
            return ""
        if not is_smaller or signature.elements not in self._scaled & self._exact:
            return ""
        return (
            f"the evaluation sums {signature.elements} floats and as many counts; the first are"
            " scaled to the world size that the script keeps, so their ratio would be too large:"
            " start it with --ranks-may-change, if it asks for that size where it uses it"
        )
