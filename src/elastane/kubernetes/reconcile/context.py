"""A decision while it is made: the inputs, the counts, and the actions so far.

Each call of `reconcile` has one context, the only mutable object in this room. Rules read it and
call its methods; it does not outlive the call.

The context also judges the API server's refusals. After 400 and 422 the manifest is not a valid
pod, so the job does not start (see `refused_template`). Any other refusal may pass: a quota, a
missing account, a name that is taken, a right to patch or to delete that the operator lacks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from elastane.kubernetes.model import (
    Action,
    DeleteJob,
    DeleteObject,
    DeletePod,
    JobStatus,
    Meta,
    Observed,
    PatchObject,
    Refusal,
    ReportedEvent,
    SeenNode,
)
from elastane.kubernetes.model.names import KIND
from elastane.kubernetes.reconcile.bounds import (
    EVENTS_MAX,
    REFUSED_FIRST_S,
    REFUSED_MAX_S,
    TEXT_CHARS_MAX,
)
from elastane.kubernetes.reconcile.pods import Judged, judge_all
from elastane.kubernetes.reconcile.settings import JobSettings

_ENDS: tuple[Literal["Failed", "Succeeded"], ...] = ("Failed", "Succeeded")


class JobVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ends."""

    kind: Literal["Succeeded", "Failed"]
    reason: str
    message: str


def standing_verdict(status: JobStatus) -> JobVerdict | None:
    """Return how a job ended before this decision; None if it has not ended."""
    for kind in _ENDS:
        condition = status.condition(kind)
        if condition is not None and condition.status == "True":
            return JobVerdict(kind=kind, reason=condition.reason, message=condition.message)
    return None


class DecisionContext:
    """The inputs, counts and actions that one call of `reconcile` gathers.

    `pods` are the job's pods, and orphans that it adopts. `others` are foreign pods and leftovers,
    whose names are taken. `gone` are deleted pods of the job, in their last state. Counters begin
    with the values of the status; `restarts` leaves out the agents' restarts of workers.
    """

    def __init__(
        self, seen: Observed, before: JobStatus, settings: JobSettings, now_s: float
    ) -> None:
        self.seen = seen
        self.before = before
        self.settings = settings
        self.now_s = now_s
        judged = judge_all(seen.pods, seen.job.metadata, settings)
        own = (pod for pod in judged if pod.ownership in ("ours", "orphan"))
        self.pods = sorted(own, key=lambda pod: (pod.index, pod.name))
        self.others = [pod for pod in judged if pod.ownership not in ("ours", "orphan")]
        gone = judge_all(seen.gone, seen.job.metadata, settings, are_gone=True)
        self.gone = [pod for pod in gone if pod.ownership == "ours"]
        self.actions: list[Action] = []
        self.events: list[ReportedEvent] = []
        self.wakes_s: list[float] = []
        self.verdict = standing_verdict(before)
        self.restarts = before.restarts - before.worker_restarts
        self.failures = before.failures
        self.disruptions = before.disruptions
        # Dictionaries keep the order of entries and make look-ups fast.
        self.counted = dict.fromkeys(before.counted)
        self.fenced = dict.fromkeys(before.fenced)
        self.in_place = {one.uid: one for one in before.in_place}
        self.early_ends = {one.index: one for one in before.early_ends}
        self.nodes = {one.name: one for one in before.nodes}
        self.last_failure = before.last_failure
        self.ended_well_time = before.ended_well_time
        self.first_start_time = before.first_start_time
        self.stuck_since_time = before.stuck_since_time
        self.start_time = before.start_time
        self.completion_time = before.completion_time
        self.slots: list[int] = []
        # Why fewer pods run than are wanted, worst first: (reason, message).
        self.shortfalls: list[tuple[str, str]] = []

    @property
    def job(self) -> Meta:
        """The job's metadata."""
        return self.seen.job.metadata

    @property
    def own(self) -> list[Judged]:
        """The job's pods that are not fenced."""
        return [pod for pod in self.pods if pod.uid not in self.fenced]

    def act(self, action: Action) -> None:
        """Add an action for the shell."""
        self.actions.append(action)

    def report(
        self,
        kind: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        count: int | None = None,
    ) -> None:
        """Add an Event for the shell, unless there are EVENTS_MAX already; see ReportedEvent."""
        event = ReportedEvent(type=kind, reason=reason, message=message, count=count)
        if event not in self.events and len(self.events) < EVENTS_MAX:
            self.events.append(event)

    def wake(self, at_s: float | None) -> None:
        """Ask for another decision at this time, unless it has passed."""
        if at_s is not None and at_s > self.now_s:
            self.wakes_s.append(at_s)

    def dismiss(self, pod: Judged, why: str, grace_s: int | None = None) -> None:
        """Delete a pod and count it, so that it is not taken for one deleted from outside."""
        self.counted.setdefault(pod.uid)
        if not pod.is_leaving or (grace_s == 0 and pod.meta.deletion_grace_period_seconds != 0):
            self.act(DeletePod(name=pod.name, uid=pod.uid, grace_s=grace_s, why=why))

    def end(self, kind: Literal["Succeeded", "Failed"], reason: str, message: str) -> None:
        """End the job; a later verdict is ignored."""
        if self.verdict is None:
            self.verdict = JobVerdict(kind=kind, reason=reason, message=message)

    def refusal(self, kind: str, name: str) -> Refusal | None:
        """Return the refusal of the last attempt to create an object, if it was refused."""
        what = ("create", kind, name)
        found = (no for no in self.seen.refused if (no.verb, no.kind, no.name) == what)
        return next(found, None)

    def node(self, name: str) -> SeenNode:
        """Return the state of a node."""
        return self.seen.nodes.get(name) or SeenNode(name=name)


_NEVER = (400, 422)


def refused_template(context: DecisionContext) -> Refusal | None:
    """Return a final refusal of the pod template, if there is one."""
    for refusal in context.seen.refused:
        if (refusal.verb, refusal.kind) == ("create", "Pod") and refusal.code in _NEVER:
            return refusal
    return None


def waits_for_refusal(context: DecisionContext, kind: str, name: str) -> bool:
    """Whether a refused creation must not be retried yet; if refused, report it."""
    refusal = context.refusal(kind, name)
    if refusal is None:
        return False
    reason = _reason(refusal)
    context.shortfalls.append((reason, f"{kind} {name} was refused: {refusal_text(refusal)}"))
    context.report(
        "Warning", f"FailedCreate{kind}", f"{name}: {refusal_text(refusal)}", refusal.times
    )
    return _is_too_soon(context, refusal)


def hold_refused(context: DecisionContext) -> None:
    """Report refused patches and deletions, and drop those that must not be retried yet."""
    refused: dict[tuple[str, str, str], Refusal] = {}
    for one in context.seen.refused:
        refused[one.verb, one.kind, one.name] = one
    kept: list[Action] = []
    for action in context.actions:
        refusal = refused.get(_target(context, action))
        if refusal is None:
            kept.append(action)
            continue
        text = (
            f"to {refusal.verb} {refusal.kind} {refusal.name} was refused: {refusal_text(refusal)}"
        )
        context.shortfalls.append((_reason(refusal), text))
        context.report("Warning", _reason(refusal), text, refusal.times)
        if not _is_too_soon(context, refusal):
            kept.append(action)
    context.actions = kept


def _target(context: DecisionContext, action: Action) -> tuple[str, str, str]:
    if isinstance(action, PatchObject):
        return "patch", action.kind, action.name
    if isinstance(action, DeletePod):
        return "delete", "Pod", action.name
    if isinstance(action, DeleteObject):
        return "delete", action.kind, action.name
    if isinstance(action, DeleteJob):
        return "delete", KIND, context.job.name
    return "", "", ""


def _is_too_soon(context: DecisionContext, refusal: Refusal) -> bool:
    pause_s = min(REFUSED_MAX_S, REFUSED_FIRST_S * 2.0 ** min(max(refusal.times, 1) - 1, 16))
    context.wake(refusal.at_s + pause_s)
    return refusal.at_s + pause_s > context.now_s


def refusal_text(refusal: Refusal) -> str:
    """Return what the server refused and why, as the message of a condition."""
    text = " ".join(refusal.message.split())
    return text[:TEXT_CHARS_MAX] or f"HTTP {refusal.code}"


def _reason(refusal: Refusal) -> str:
    if refusal.code == 409:
        return "NameTaken"
    if refusal.code == 403:
        return "QuotaExceeded" if "quota" in refusal.message.lower() else "Forbidden"
    return "Refused"
