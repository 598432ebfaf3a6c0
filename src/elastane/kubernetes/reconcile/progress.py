"""A job's progress: its last step, and failures that repeat without a new one.

An agent restarts a failed worker inside its pod, so all pods run while a job makes no progress. The
coordinator's report has its step and the restarts of its workers. The status keeps what must
outlast a decision: when the step last rose, and the failures since it was at its highest.
"""

from __future__ import annotations

import msgspec

from elastane.kubernetes.bridge.messages import JobReport
from elastane.kubernetes.model import as_time, since_epoch
from elastane.kubernetes.model.status import Crashes
from elastane.kubernetes.reconcile.bounds import CRASHES_TOLD_MIN, QUICK_S
from elastane.kubernetes.reconcile.context import DecisionContext


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`worker_restarts`: by the job's agents, within their pods. `last_time`: of the last step."""

    worker_restarts: int = 0
    last_time: str | None = None
    crashes: Crashes = Crashes()

    @property
    def is_crashing(self) -> bool:
        """Whether failures come again and again, and the step rises no higher."""
        return self.crashes.count >= CRASHES_TOLD_MIN


def current_report(context: DecisionContext) -> JobReport | None:
    """Return the coordinator's report if it is about any of the pods that live."""
    report = context.seen.report
    living = {pod.uid for pod in context.own if pod.lives and not pod.is_leaving}
    known = {member.pod for member in report.members} if report is not None else set[str]()
    return None if living.isdisjoint(known) else report


def follow(context: DecisionContext) -> JobProgress:
    """Return how the job gets on."""
    before, report = context.before, current_report(context)
    step = report.step if report is not None else 0
    restarts = max(before.worker_restarts, report.restarts if report is not None else 0)
    failures = restarts - before.worker_restarts + max(0, context.failures - before.failures)
    is_ahead = step > (before.step or 0)
    return JobProgress(
        worker_restarts=restarts,
        last_time=as_time(context.now_s) if is_ahead else before.last_progress_time,
        crashes=_crashes(context, before.crashes or Crashes(), step, failures),
    )


def _crashes(context: DecisionContext, before: Crashes, step: int, failures: int) -> Crashes:
    """Count failures in a row; a new highest step ends the row, and so does a quiet time."""
    last_s = since_epoch(before.time)
    is_over = step > before.step or (last_s is not None and context.now_s >= last_s + QUICK_S)
    count = failures + (0 if is_over else before.count)
    time = as_time(context.now_s) if failures else before.time if count else None
    if count:
        context.wake((since_epoch(time) or context.now_s) + QUICK_S)
    return Crashes(count=count, step=max(step, before.step), time=time)


def stalled_since(context: DecisionContext, progress: JobProgress) -> str | None:
    """Return since when a job that could train has made no step, if that is for too long.

    Only where steps are reported: an unmodified script reports none. The time begins when enough
    pods run.
    """
    limit_s = context.settings.spec.stalled_seconds
    report, running = current_report(context), context.before.condition("Running")
    if not limit_s or report is None or not (report.step and report.world_size):
        return None
    if running is None or running.status != "True":
        return None
    last_s = since_epoch(progress.last_time) or context.now_s
    last_s = max(last_s, since_epoch(running.last_transition_time) or last_s)
    context.wake(last_s + limit_s)
    return as_time(last_s) if context.now_s >= last_s + limit_s else None
