"""A job with a wrong spec: it reports the faults and waits for an edit.

A job that has not begun fails immediately, for that edition of its spec; an edit lets it begin. One
that runs is left as it is, whatever its pods do: a typing error must not end a training.
"""

from __future__ import annotations

import msgspec

from elastane.kubernetes.model import (
    Condition,
    Decision,
    JobStatus,
    Observed,
    ReportedEvent,
    as_time,
)
from elastane.kubernetes.model.names import selector
from elastane.kubernetes.reconcile.bounds import WRONGS_TOLD_MAX
from elastane.kubernetes.reconcile.conditions import last_is, merged
from elastane.kubernetes.reconcile.ending import begin_anew, has_ended, may_begin_anew
from elastane.kubernetes.reconcile.validation import Wrong


def refuse(seen: Observed, before: JobStatus, wrong: tuple[Wrong, ...], now_s: float) -> Decision:
    """Return the decision about a job that cannot be understood."""
    meta = seen.job.metadata
    if may_begin_anew(before, meta.edition):
        before = begin_anew(before)
    if has_ended(before):
        return Decision(status=before)
    text = "; ".join(str(one) for one in wrong[:WRONGS_TOLD_MAX])
    if len(wrong) > WRONGS_TOLD_MAX:
        text += f"; and {len(wrong) - WRONGS_TOLD_MAX} more"
    has_begun = before.start_time is not None or any(
        pod.metadata.controller == meta.uid for pod in seen.pods
    )
    kind = "Degraded" if has_begun else "Failed"
    made = {one.type: one for one in before.conditions if one.type != kind}
    made["Created"] = _said("Created", "ElasticJobCreated", f"ElasticJob {meta.name} is created.")
    made[kind] = _said(kind, wrong[0].reason, text)
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
    told = ReportedEvent(type="Warning", reason=wrong[0].reason, message=text)
    return Decision(status=status, events=(told,))


def _said(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)
