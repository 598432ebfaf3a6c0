"""A decision while it is made: what is known, what was counted, and the actions so far.

One context for one call of `reconcile`, and the only mutable object here. Rules read it and call
its methods; it does not outlive the call.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from elastane.kubernetes.model import (
    Action,
    DeletePod,
    JobStatus,
    Meta,
    Observed,
    Refusal,
    ReportedEvent,
    SeenNode,
)
from elastane.kubernetes.reconcile.bounds import EVENTS_MAX
from elastane.kubernetes.reconcile.pods import Judged
from elastane.kubernetes.reconcile.settings import JobSettings


class JobVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ends."""

    kind: Literal["Succeeded", "Failed"]
    reason: str
    message: str


class DecisionContext:
    """The inputs, counts and actions that one call of `reconcile` gathers.

    `pods` are those that are, or become, the job's: ours and orphans. `others` hold names.
    `gone` are pods of the job that were deleted, in their last state.
    Counters begin as the status has them; `restarts` are those that the operator counts itself.
    """

    def __init__(
        self, seen: Observed, before: JobStatus, settings: JobSettings, now_s: float
    ) -> None:
        self.seen = seen
        self.before = before
        self.settings = settings
        self.now_s = now_s
        self.pods: list[Judged] = []
        self.others: list[Judged] = []
        self.gone: list[Judged] = []
        self.actions: list[Action] = []
        self.events: list[ReportedEvent] = []
        self.wakes_s: list[float] = []
        self.verdict: JobVerdict | None = None
        self.restarts = before.restarts - before.worker_restarts
        self.failures = before.failures
        self.disruptions = before.disruptions
        # Dictionaries for their order and for quick look-up.
        self.counted = dict.fromkeys(before.counted)
        self.fenced = dict.fromkeys(before.fenced)
        self.in_place = {one.uid: one for one in before.in_place}
        self.troubles = {one.index: one for one in before.troubles}
        self.nodes = {one.name: one for one in before.nodes}
        self.last_failure = before.last_failure
        self.ended_well_time = before.ended_well_time
        self.first_start_time = before.first_start_time
        self.stuck_since_time = before.stuck_since_time
        self.start_time = before.start_time
        self.completion_time = before.completion_time
        self.slots: list[int] = []
        # Why fewer pods run than are wanted, worst first: (reason, message).
        self.wants: list[tuple[str, str]] = []

    @property
    def job(self) -> Meta:
        """The job's metadata."""
        return self.seen.job.metadata

    @property
    def own(self) -> list[Judged]:
        """Pods that count for the job: those that are not fenced."""
        return [pod for pod in self.pods if pod.uid not in self.fenced]

    def act(self, action: Action) -> None:
        """Have the shell do something."""
        self.actions.append(action)

    def tell(
        self,
        kind: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        count: int | None = None,
    ) -> None:
        """Have the shell publish an Event, of which there are at most EVENTS_MAX; see Told."""
        told = ReportedEvent(type=kind, reason=reason, message=message, count=count)
        if told not in self.events and len(self.events) < EVENTS_MAX:
            self.events.append(told)

    def wake(self, at_s: float | None) -> None:
        """Decide again at that time, if it is not past."""
        if at_s is not None and at_s > self.now_s:
            self.wakes_s.append(at_s)

    def dismiss(self, pod: Judged, why: str, grace_s: int | None = None) -> None:
        """Delete a pod, and have that accounted for: it is not somebody else who takes it away."""
        self.counted.setdefault(pod.uid)
        if not pod.is_leaving or (grace_s == 0 and pod.meta.deletion_grace_period_seconds != 0):
            self.act(DeletePod(name=pod.name, uid=pod.uid, grace_s=grace_s, why=why))

    def end(self, kind: Literal["Succeeded", "Failed"], reason: str, message: str) -> None:
        """End the job; the first verdict stands."""
        if self.verdict is None:
            self.verdict = JobVerdict(kind=kind, reason=reason, message=message)

    def refusal(self, kind: str, name: str) -> Refusal | None:
        """Return what the API server said to the last try to create something."""
        what = ("create", kind, name)
        found = (no for no in self.seen.refused if (no.deed, no.kind, no.name) == what)
        return next(found, None)

    def node(self, name: str) -> SeenNode:
        """Return what is known of a node."""
        return self.seen.nodes.get(name) or SeenNode(name=name)
