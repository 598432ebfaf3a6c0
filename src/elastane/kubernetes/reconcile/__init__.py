"""The decision about one ElasticJob: a pure function of the observed objects.

`reconcile` is level-triggered: it decides from the state and never from events. So an event that is
lost, late or repeated changes only the time of a decision. It is idempotent: existing objects are
not created again, and a deletion is not repeated. Its only memory is the job's status, which is
written before the actions that the status counts.

It uses no clock, I/O or randomness. It does not fail: an unreadable object is reported in a
condition. The rules of a decision, in their order: a job of another controller; one that is being
deleted; one whose spec is to be made of a job template; a wrong spec; a job that has ended; fencing
of pods on lost nodes; counting of ended pods; the end of the job; a suspended job; a job that
finishes; a job that runs.
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
from elastane.kubernetes.reconcile.job_templates import make_of_template, template_to_read
from elastane.kubernetes.reconcile.ledger import count
from elastane.kubernetes.reconcile.node_loss import fence
from elastane.kubernetes.reconcile.objects import drop_group, keep_directive
from elastane.kubernetes.reconcile.running import finish, live, pause, wanted_slots
from elastane.kubernetes.reconcile.settings import is_managed_elsewhere, read
from elastane.kubernetes.reconcile.status import status_of

__all__ = ["reconcile", "template_to_read"]


def reconcile(seen: Observed, now_s: float) -> Decision:
    """Return the actions for a job, its status, and when to ask again.

    `now_s`: seconds since the epoch, by the clock that also stamped the status. If that clock
    jumps, deadlines and pauses become shorter or longer; nothing else changes.
    """
    if is_managed_elsewhere(seen.job):
        return Decision(status=None)
    before = read_status(seen.job.status)
    if seen.job.metadata.is_leaving:
        return _leave(seen, before)
    if template_to_read(seen.job) is not None:
        return make_of_template(seen, before, now_s)
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

    The collector would delete the pods as well, but it may learn of the resource 30 s after its
    installation. With --cascade=orphan the user keeps the pods.
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
        drop_group(context)
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
    if context.shortfalls:
        context.wake(context.now_s + LOOK_AGAIN_S)
    wakes_s = [at_s - context.now_s for at_s in context.wakes_s]
    return Decision(
        status=status,
        actions=tuple(context.actions),
        events=tuple(context.events),
        again_in_s=min(wakes_s) if wakes_s else None,
    )
