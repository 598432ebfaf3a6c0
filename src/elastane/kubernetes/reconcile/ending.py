"""The ways in which a job ends, and the actions after its end, which is final.

Pods that still run after the job's end waste resources. So an unset cleanPodPolicy deletes them,
and keeps ended pods for their logs. An explicit None deletes no pod, except in a job whose
activeDeadlineSeconds have passed.

A job with a wrong spec reports the faults and waits for an edit. If it has not begun, it fails
immediately, for that edition of its spec; an edit lets it begin. If it runs, its pods are left
alone: a typing error must not end a training.
"""

from __future__ import annotations

import msgspec

from elastane.kubernetes.model import (
    Condition,
    Decision,
    DeleteJob,
    JobStatus,
    Observed,
    ReportedEvent,
    as_time,
    since_epoch,
)
from elastane.kubernetes.model.names import selector
from elastane.kubernetes.reconcile.bounds import FAULTS_SHOWN_MAX, STARTLESS_S
from elastane.kubernetes.reconcile.context import DecisionContext, refusal_text, refused_template
from elastane.kubernetes.reconcile.pods import CANNOT_START, NEVER_STARTS
from elastane.kubernetes.reconcile.settings import Wrong
from elastane.kubernetes.reconcile.status import last_is, merged

DEADLINE = "DeadlineExceeded"
# Failures of a job that has not begun; after an edit of the spec it may begin.
_CORRIGIBLE = ("InvalidSpec", "InvalidTemplate")
_TEMPLATE = "spec.replicaSpecs.Worker.template"


def has_ended(status: JobStatus) -> bool:
    """Whether the job has ended."""
    return status.is_("Succeeded") or status.is_("Failed")


def may_start_again(status: JobStatus, edition: int) -> bool:
    """Whether a job whose specification kept it from starting has been edited since it failed."""
    return is_corrigible(status) and status.observed_generation != edition


def is_corrigible(status: JobStatus) -> bool:
    """Whether the job failed since its specification kept it from starting."""
    failed = status.condition("Failed")
    return failed is not None and failed.status == "True" and failed.reason in _CORRIGIBLE


def start_again(status: JobStatus) -> JobStatus:
    """Return the status of such a job before it failed; its counts of restarts are kept."""
    return msgspec.structs.replace(
        status,
        phase="",
        conditions=(),
        start_time=None,
        stuck_since_time=None,
        completion_time=None,
    )


def judge_end(context: DecisionContext) -> None:
    """End the job if its deadline has passed, its work is done, or it cannot begin."""
    _check_success(context)
    _check_deadline(context)
    _check_template(context)
    _check_start(context)


def _check_success(context: DecisionContext) -> None:
    if context.ended_well_time is None:
        return
    if not any(pod.lives for pod in context.own):
        context.end("Succeeded", "PodsSucceeded", f"ElasticJob {context.job.name} has succeeded.")


def _check_deadline(context: DecisionContext) -> None:
    deadline_s = context.settings.spec.active_deadline_seconds
    begun_s = since_epoch(context.start_time)
    if deadline_s is None or begun_s is None:
        return
    if context.now_s < begun_s + deadline_s:
        context.wake(begun_s + deadline_s)
    elif context.ended_well_time is not None:
        text = f"ElasticJob {context.job.name} has succeeded; some pods did not end in time."
        context.end("Succeeded", DEADLINE, text)
    else:
        text = f"active for longer than activeDeadlineSeconds, {deadline_s}"
        context.end("Failed", DEADLINE, text)


def _check_template(context: DecisionContext) -> None:
    """Act on a template that the API server rejects: a job without pods ends, others report it."""
    refusal = refused_template(context)
    if refusal is None:
        return
    text = f"{_TEMPLATE}: the API server refused pod {refusal.name}: {refusal_text(refusal)}"
    if any(pod.lives for pod in context.own):
        context.shortfalls.insert(0, ("InvalidTemplate", text))
        context.report("Warning", "InvalidTemplate", text, count=1)
    else:
        context.end("Failed", "InvalidTemplate", text)


def _check_start(context: DecisionContext) -> None:
    """Let a job fail if no pod of it ever ran and none can start for STARTLESS_S.

    Only pods of the current template count, so that time begins again after an edit.
    """
    if any(pod.has_started for pod in context.pods) and context.first_start_time is None:
        context.first_start_time = as_time(context.now_s)
    stuck = [
        pod
        for pod in context.own
        if pod.hindrance and pod.hindrance.reason in CANNOT_START and not pod.is_outdated
    ]
    if context.first_start_time is not None or not stuck or context.settings.is_suspended:
        context.stuck_since_time = None
        return
    context.stuck_since_time = context.stuck_since_time or as_time(context.now_s)
    since_s = since_epoch(context.stuck_since_time) or context.now_s
    hindrance = stuck[0].hindrance
    if hindrance is None:
        return
    is_final = hindrance.reason == NEVER_STARTS
    if is_final or context.now_s >= since_s + STARTLESS_S:
        text = f"{_TEMPLATE}: {stuck[0].name}: {hindrance.reason}: {hindrance.message}"
        context.end("Failed", "InvalidTemplate", text)
    else:
        context.wake(since_s + STARTLESS_S)


def clean_up(context: DecisionContext, reason: str) -> None:
    """Delete pods as cleanPodPolicy says, and the job itself after ttlSecondsAfterFinished."""
    policy = context.settings.spec.clean_pod_policy or "Running"
    if policy == "None" and reason == DEADLINE:
        policy = "Running"
    for pod in context.pods:
        # Under Always the kubelet restarts containers for ever, also those that succeeded.
        still_runs = not pod.is_over
        is_unwanted = policy == "All" or (policy == "Running" and still_runs)
        is_endless = still_runs and context.settings.policy == "Always"
        if (is_unwanted or is_endless) and pod.uid not in context.fenced:
            context.dismiss(pod, f"the job has ended, cleanPodPolicy {policy}")
    _live_out(context)


def _live_out(context: DecisionContext) -> None:
    ttl_s = context.settings.spec.ttl_seconds_after_finished
    ended_s = since_epoch(context.completion_time)
    if ttl_s is None or ended_s is None:
        return
    if context.now_s < ended_s + ttl_s:
        context.wake(ended_s + ttl_s)
        return
    text = f"ttlSecondsAfterFinished, {ttl_s}, is over: the job is deleted"
    context.report("Normal", "TimeToLiveOver", text)
    context.act(DeleteJob(uid=context.job.uid))


def refuse(seen: Observed, before: JobStatus, wrong: tuple[Wrong, ...], now_s: float) -> Decision:
    """Return the decision about a job with a wrong spec."""
    meta = seen.job.metadata
    if may_start_again(before, meta.edition):
        before = start_again(before)
    if has_ended(before):
        return Decision(status=before)
    text = "; ".join(str(one) for one in wrong[:FAULTS_SHOWN_MAX])
    if len(wrong) > FAULTS_SHOWN_MAX:
        text += f"; and {len(wrong) - FAULTS_SHOWN_MAX} more"
    has_begun = before.start_time is not None or any(
        pod.metadata.controller == meta.uid for pod in seen.pods
    )
    kind = "Degraded" if has_begun else "Failed"
    made = {one.type: one for one in before.conditions if one.type != kind}
    made["Created"] = _true_condition(
        "Created", "ElasticJobCreated", f"ElasticJob {meta.name} is created."
    )
    made[kind] = _true_condition(kind, wrong[0].reason, text)
    conditions = merged(before.conditions, made, meta.edition, now_s)
    status = msgspec.structs.replace(
        before,
        phase=kind,
        observed_generation=meta.edition,
        conditions=last_is(conditions, kind),
        selector=selector(meta.name),
        completion_time=before.completion_time if has_begun else as_time(now_s),
    )
    if before.condition(kind) == status.condition(kind):
        return Decision(status=before)
    event = ReportedEvent(type="Warning", reason=wrong[0].reason, message=text)
    return Decision(status=status, events=(event,))


def _true_condition(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)
