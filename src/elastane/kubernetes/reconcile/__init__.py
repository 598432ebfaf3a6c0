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
from elastane.kubernetes.reconcile.context import DecisionContext, hold_refused
from elastane.kubernetes.reconcile.ending import (
    clean_up,
    judge_end,
    may_start_again,
    refuse,
    start_again,
)
from elastane.kubernetes.reconcile.ledger import count
from elastane.kubernetes.reconcile.node_loss import fence
from elastane.kubernetes.reconcile.objects import keep_directive
from elastane.kubernetes.reconcile.running import finish, live, pause, wanted_slots
from elastane.kubernetes.reconcile.settings import read
from elastane.kubernetes.reconcile.status import status_of

__all__ = ["reconcile"]


def reconcile(seen: Observed, now_s: float) -> Decision:
    """Return the actions for a job, its status, and when to ask again.

    `now_s`: seconds since the epoch, of the clock that also stamped the status; it may jump, by
    which deadlines and pauses become shorter or longer, and nothing else.
    """
    before = read_status(seen.job.status)
    if seen.job.metadata.is_leaving:
        return _leave(seen, before)
    reading = read(seen.job)
    if reading.settings is None:
        return refuse(seen, before, reading.wrong, now_s)
    if may_start_again(before, seen.job.metadata.edition):
        before = start_again(before)
    context = DecisionContext(seen, before, reading.settings, now_s)
    _apply_rules(context)
    return _decision(context, status_of(context, context.verdict))


def _leave(seen: Observed, before: JobStatus) -> Decision:
    """Delete the pods of a job that is being deleted; the garbage collector does the rest.

    It would delete these as well, but it may first hear of the resource 30 s after that was
    installed. A user who deletes with --cascade=orphan wants to keep them.
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


def _apply_rules(context: DecisionContext) -> None:
    has_ended = context.verdict is not None
    fence(context, counting=not has_ended)
    if not has_ended:
        context.start_time = None if context.settings.is_suspended else _active_since(context)
        count(context)
        judge_end(context)
    context.slots = wanted_slots(context)
    if context.verdict is not None:
        context.completion_time = context.completion_time or as_time(context.now_s)
        clean_up(context, context.verdict.reason)
        keep_directive(context)
    elif context.settings.is_suspended:
        pause(context)
    elif context.ended_well_time is not None:
        finish(context)
    else:
        live(context)
    hold_refused(context)


def _active_since(context: DecisionContext) -> str:
    return context.start_time or as_time(context.now_s)


def _decision(context: DecisionContext, status: JobStatus) -> Decision:
    if context.wants:
        context.wake(context.now_s + LOOK_AGAIN_S)
    wakes_s = [at_s - context.now_s for at_s in context.wakes_s]
    return Decision(
        status=status,
        actions=tuple(context.actions),
        events=tuple(context.events),
        again_in_s=min(wakes_s) if wakes_s else None,
    )
