"""The decision about one ElasticJob: a pure function of the observed objects.

`reconcile` is level-triggered: it looks at the state and never at events, so an event that was
lost, came twice or came late changes only when it is called. It is idempotent: existing objects are
not made again, and deletions under way are not repeated. Its only memory is the job's status, which
is written before the actions that it accounts for.

No clock, no I/O, no randomness. It does not fail: what it cannot read is reported in a condition. A
job's life, in the order of the rules: it is being deleted; its spec is wrong; it has ended; pods of
lost nodes are fenced; ends are counted; it ends; it is suspended; it finishes; it runs.
"""

from __future__ import annotations

from elastane.kubernetes.model import (
    Decision,
    DeletePod,
    JobStatus,
    Observed,
    as_time,
    read_status,
)
from elastane.kubernetes.reconcile.bounds import LOOK_AGAIN_S
from elastane.kubernetes.reconcile.context import Draft, JobVerdict
from elastane.kubernetes.reconcile.ending import (
    begin_anew,
    clean_up,
    has_ended,
    judge_end,
    may_begin_anew,
)
from elastane.kubernetes.reconcile.invalid import refuse
from elastane.kubernetes.reconcile.ledger import count
from elastane.kubernetes.reconcile.node_loss import fence
from elastane.kubernetes.reconcile.objects import keep_directive
from elastane.kubernetes.reconcile.pods import judge
from elastane.kubernetes.reconcile.reporting import status_of
from elastane.kubernetes.reconcile.running import finish, live, pause
from elastane.kubernetes.reconcile.settings import JobSettings, read
from elastane.kubernetes.reconcile.slots import wanted_slots
from elastane.kubernetes.reconcile.waiting import hold_refused

__all__ = ["reconcile"]


def reconcile(seen: Observed, now_s: float) -> Decision:
    """Return what is to be done about a job, its status, and when to ask again.

    `now_s`: seconds since the epoch, of the clock that also stamped the status; it may jump, by
    which deadlines and pauses become shorter or longer, and nothing else.
    """
    before = read_status(seen.job.status)
    if seen.job.metadata.is_leaving:
        return _leave(seen, before)
    reading = read(seen.job)
    if reading.settings is None:
        return refuse(seen, before, reading.wrong, now_s)
    if may_begin_anew(before, seen.job.metadata.edition):
        before = begin_anew(before)
    draft = Draft(seen, before, reading.settings, now_s)
    _sort(draft, reading.settings)
    verdict = _decided(draft)
    return _decision(draft, status_of(draft, verdict))


def _leave(seen: Observed, before: JobStatus) -> Decision:
    """Delete the pods of a job that is being deleted; the garbage collector does the rest.

    It would delete these as well, but it may first hear of the resource 30 s after that was
    installed. Whoever deletes with --cascade=orphan wants to keep them.
    """
    meta = seen.job.metadata
    if "orphan" in meta.finalizers:
        return Decision(status=before)
    actions = tuple(
        DeletePod(name=pod.metadata.name, uid=pod.metadata.uid, grace_s=None, why="job deleted")
        for pod in seen.pods
        if pod.metadata.controller == meta.uid and not pod.metadata.is_leaving
    )
    return Decision(status=before, actions=actions)


def _sort(draft: Draft, settings: JobSettings) -> None:
    for pod in draft.seen.pods:
        judged = judge(pod, draft.job, settings)
        if judged is None:
            continue
        if judged.whose in ("ours", "orphan"):
            draft.pods.append(judged)
        else:
            draft.others.append(judged)
    for pod in draft.seen.gone:
        judged = judge(pod, draft.job, settings, is_gone=True)
        if judged is not None and judged.whose == "ours":
            draft.gone.append(judged)
    draft.pods.sort(key=lambda pod: (pod.index, pod.name))


def _decided(draft: Draft) -> JobVerdict | None:
    """Apply the rules; return the verdict of a job that has ended, now or before."""
    ended = has_ended(draft.before)
    fence(draft, counting=not ended)
    draft.slots = wanted_slots(draft)
    if ended:
        draft.verdict = _standing(draft.before)
    else:
        draft.start_time = None if draft.settings.is_suspended else _active_since(draft)
        count(draft)
        judge_end(draft)
        draft.slots = wanted_slots(draft)
    verdict = draft.verdict
    if verdict is not None:
        draft.completion_time = draft.completion_time or as_time(draft.now_s)
        clean_up(draft, verdict.reason)
        keep_directive(draft)
    elif draft.settings.is_suspended:
        pause(draft)
    elif draft.ended_well_time is not None:
        finish(draft)
    else:
        live(draft)
    hold_refused(draft)
    return verdict


def _active_since(draft: Draft) -> str:
    return draft.start_time or as_time(draft.now_s)


def _standing(before: JobStatus) -> JobVerdict:
    kind = "Failed" if before.is_("Failed") else "Succeeded"
    condition = before.condition(kind)
    assert condition is not None
    return JobVerdict(
        kind="Failed" if kind == "Failed" else "Succeeded",
        reason=condition.reason,
        message=condition.message,
    )


def _decision(draft: Draft, status: JobStatus) -> Decision:
    if draft.wants:
        draft.wake(draft.now_s + LOOK_AGAIN_S)
    wakes_s = [at_s - draft.now_s for at_s in draft.wakes_s]
    return Decision(
        status=status,
        actions=tuple(draft.actions),
        events=tuple(draft.events),
        again_in_s=min(wakes_s) if wakes_s else None,
    )
