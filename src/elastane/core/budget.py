"""The restart budget: how often a failed worker group may start again, and how soon.

One budget for the whole job, kept by the coordinator and in its durable record (torchrun has
one for each agent, which starts anew with a new agent). Departures and arrivals never use it.
"""

from __future__ import annotations

import msgspec

from elastane.core.limits import BACKOFF_FIRST_S, BACKOFF_MAX_S


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget says to one more failure."""

    restart: bool
    delay_s: float
    reason: str


class RestartBudget(msgspec.Struct, kw_only=True):
    """Restarts used of those allowed, and how many quick failures came in a row."""

    allowed: int
    used: int = 0
    quick_failures: int = 0

    def charge(self, lived_s: float, crash_loop_s: float) -> Verdict:
        """Use one restart for an attempt that failed after `lived_s` seconds.

        It was a quick failure if that is less than `crash_loop_s`. Counts nothing when the
        budget is used up. The first quick failure restarts at once; from the second in a row on,
        a pause doubles up to its bound.
        """
        self.quick_failures = self.quick_failures + 1 if lived_s < crash_loop_s else 0
        if self.used >= self.allowed:
            return Verdict(restart=False, delay_s=0.0, reason=self._exhausted(crash_loop_s))
        self.used += 1
        delay_s = self._delay_s()
        pause = f", after a pause of {delay_s:g} s against a crash loop" if delay_s else ""
        return Verdict(
            restart=True, delay_s=delay_s, reason=f"restart {self.used} of {self.allowed}{pause}"
        )

    def _delay_s(self) -> float:
        if self.quick_failures < 2:
            return 0.0
        # The exponent is bounded so that a float never overflows in a very long loop.
        doubled: float = BACKOFF_FIRST_S * 2.0 ** min(self.quick_failures - 2, 16)
        return min(BACKOFF_MAX_S, doubled)

    def _exhausted(self, crash_loop_s: float) -> str:
        if self.allowed == 0:
            return "no restarts are allowed (--max-restarts 0)"
        loop = (
            f"; a crash loop: the last {self.quick_failures} attempts each failed"
            f" within {crash_loop_s:g} s of their start"
            if self.quick_failures > 1
            else ""
        )
        return f"all {self.allowed} restarts of the job are used{loop}"
