"""The restart budget: how often a failed worker group may start again, and how soon.

One budget for the whole job, kept by the coordinator and in its durable record (torchrun has
one for each agent, which starts anew with a new agent). Departures and arrivals never use it.
"""

from __future__ import annotations

import msgspec

from elastane.protocol.limits import BACKOFF_FIRST_S, BACKOFF_MAX_S, SAME_CRASHES_MAX, Timing


class BudgetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget says to one more failure."""

    restart: bool
    delay_s: float
    reason: str


class Crash(msgspec.Struct, frozen=True):
    """An error of the script itself, and the nodes on which it ended an attempt."""

    site: str
    nodes: tuple[str, ...]


class RestartBudget(msgspec.Struct, kw_only=True):
    """Restarts used of those allowed, and how many quick failures came in a row.

    `crashes` counts the attempts in a row that ended by the error `crash` before a step.
    """

    allowed: int
    used: int = 0
    quick_failures: int = 0
    crash: Crash | None = None
    crashes: int = 0

    def charge(self, lived_s: float, timing: Timing, crash: Crash | None = None) -> BudgetVerdict:
        """Use one restart for an attempt that failed after `lived_s` seconds.

        It was a quick failure if that is less than `crash_loop_s`. Counts nothing when the
        budget is used up. The first quick failure restarts at once; from the second in a row on,
        a pause doubles up to its bound. The same `crash` SAME_CRASHES_MAX times in a row, each
        sooner than `same_crash_s`, gets no restart.
        """
        self.quick_failures = self.quick_failures + 1 if lived_s < timing.crash_loop_s else 0
        self._count_crash(crash if lived_s < timing.same_crash_s else None)
        if self.used >= self.allowed:
            reason = self._exhausted(timing.crash_loop_s)
            return BudgetVerdict(restart=False, delay_s=0.0, reason=reason)
        if self.crash is not None and self.crashes >= SAME_CRASHES_MAX:
            reason = (
                f"{self.crashes} attempts in a row failed before their first step with the same"
                f" error at the same place ({self.crash.site}), so no other one is started;"
                " --rdzv-conf same_crash=0 restarts all the same"
            )
            return BudgetVerdict(restart=False, delay_s=0.0, reason=reason)
        self.used += 1
        delay_s = self._delay_s()
        pause = f", after a pause of {delay_s:g} s against a crash loop" if delay_s else ""
        return BudgetVerdict(
            restart=True, delay_s=delay_s, reason=f"restart {self.used} of {self.allowed}{pause}"
        )

    def _count_crash(self, crash: Crash | None) -> None:
        same = crash is not None and crash == self.crash
        self.crashes = self.crashes + 1 if same else int(crash is not None)
        self.crash = crash

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
