"""Counts each end of a pod exactly once, and decides what follows from the counts.

The status with a pod's uid in `counted` is written before the pod is deleted. So an operator that
is killed between the two writes neither counts the end twice nor misses it. The uid leaves the list
some time after the pod.

A pod that is being deleted and is not in the list was deleted by another client: by a person, a
drain, or a preemption. That is not a failure.
"""

from __future__ import annotations

import msgspec

from elastane.errors import ExitCode
from elastane.kubernetes.model import ReleaseLease, as_time, since_epoch
from elastane.kubernetes.model.spec import RuleAction
from elastane.kubernetes.model.status import EarlyEnd, IncidentStatus, InPlace, NodeFailures
from elastane.kubernetes.reconcile.bounds import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    COUNTED_KEPT,
    FIRST_START_LIVED_S,
    FIRST_START_S,
    NODES_KEPT,
    QUICK_S,
)
from elastane.kubernetes.reconcile.context import DecisionContext
from elastane.kubernetes.reconcile.exit_codes import documented, ruled
from elastane.kubernetes.reconcile.manifest import backend, rdzv_id
from elastane.kubernetes.reconcile.pods import Judged, PodEnd, ending_text
from elastane.kubernetes.reconcile.settings import JobSettings
from elastane.kubernetes.store.objects import lease_of


def count(context: DecisionContext) -> None:
    """Count pods that ended since the last decision; end the job after a permanent failure."""
    own, known = context.own, set(context.counted)
    for pod in own:
        # Successes are counted first: a failure after the job has ended well does not count.
        if pod.state == "succeeded" and pod.by_itself and pod.uid not in context.counted:
            _count_success(context, pod)
    for pod in own:
        _count_in_place(context, pod)
        if pod.uid in context.counted or (pod.state == "succeeded" and pod.by_itself):
            continue
        if pod.ending is not None and pod.by_itself:
            _count_failure(context, pod, pod.ending)
        elif pod.is_leaving and pod.ownership == "ours":
            _count_departure(context, pod)
    _release_lease(context, known)
    _heal(context)
    _check_limit(context)
    _forget(context)


def _count_success(context: DecisionContext, pod: Judged) -> None:
    """Record in the status that the job ended well, so that the pod may be deleted."""
    if context.ended_well_time is None:
        context.ended_well_time = as_time(context.now_s)
        context.report(
            "Normal", "WorkerSucceeded", f"{pod.name} succeeded: no further pod is created"
        )


def _count_failure(context: DecisionContext, pod: Judged, ending: PodEnd) -> None:
    action = action_of(ending, context.settings)
    if action == "Fail" and _may_lack_rendezvous(context, ending):
        action = "Ignore"
        text = f"{pod.name}: {ending.text}; its rendezvous may not be up yet: started again"
        context.report("Warning", "FirstStart", text)
    context.counted[pod.uid] = None
    if ending.cause == "OOM":
        context.report("Warning", "PodOOM", f"{pod.name} on {pod.node}: {ending.text}")
    elif ending.code is not None:
        context.report("Warning", "ExitedWithCode", f"{pod.name}: {ending.text}")
    if ending.cause not in ("App", "OOM"):
        context.disruptions += 1
        context.report("Warning", f"Pod{ending.cause}", f"{pod.name} on {pod.node}: {ending.text}")
    else:
        text = f"{pod.name} on {pod.node}: {ending.text}"
        context.last_failure = IncidentStatus(cause=text, time=as_time(context.now_s))
    if ending.cause in ("App", "OOM") and action != "Ignore":
        context.failures += 1
        _charge_node(context, pod.node, unfit=ending.code == ExitCode.NODE_UNFIT)
    # An agent of elastane ends with 0 if the whole job succeeded; torchrun's only if its node did.
    is_over = context.ended_well_time is not None and context.settings.spec.launcher == "elastane"
    if action == "Fail" and not is_over:
        context.end("Failed", "PodFailed", f"{pod.name} on {pod.node}: {ending.text}, permanent")
    elif context.ended_well_time is None:
        context.restarts += 1
        _note_early_end(context, pod, ending.cause, lived_s=ending.lived_s)


def _release_lease(context: DecisionContext, known: set[str]) -> None:
    """Release the coordinator's Lease at once if its pod was counted just now as dead."""
    new = [pod for pod in context.own if pod.uid in context.counted and pod.uid not in known]
    dead = {pod.uid: pod.name for pod in new if pod.is_dead}
    if dead and backend(context.job, context.settings) == "kubernetes":
        context.act(ReleaseLease(lease=lease_of(rdzv_id(context.job, context.settings)), pods=dead))


def action_of(ending: PodEnd, settings: JobSettings) -> RuleAction:
    """Return what a pod's failure means: a new pod, counted or not, or the end of the job."""
    if ending.cause not in ("App", "OOM"):
        return "Ignore"
    if settings.policy == "ExitCode":
        if ending.code is None:
            return "Retry"
        rule = ruled(ending.code, settings.spec.exit_code_rules)
        return rule or documented(ending.code, settings.spec.launcher)
    if ending.code == ExitCode.DRAINED and settings.spec.launcher == "elastane":
        return "Ignore"
    return "Fail" if settings.policy == "Never" else "Retry"


def _may_lack_rendezvous(context: DecisionContext, ending: PodEnd) -> bool:
    """Whether a pod may have failed because the user's rendezvous has not started yet.

    That needs exit code 1, which has no meaning of its own, and no rule of the user for it.
    """
    settings, begun_s = context.settings, since_epoch(context.start_time)
    if backend(context.job, settings) == "kubernetes" or settings.policy != "ExitCode":
        return False
    if ending.code != 1 or ruled(1, settings.spec.exit_code_rules) is not None:
        return False
    is_quick = ending.lived_s is not None and ending.lived_s < FIRST_START_LIVED_S
    return is_quick and begun_s is not None and context.now_s < begun_s + FIRST_START_S


def _count_departure(context: DecisionContext, pod: Judged) -> None:
    context.counted[pod.uid] = None
    context.disruptions += 1
    if context.ended_well_time is None:
        context.restarts += 1
        _note_early_end(context, pod, "Deleted", lived_s=QUICK_S)
    context.report("Normal", "PodDeleted", f"another client deleted {pod.name}: replaced")


def _count_in_place(context: DecisionContext, pod: Judged) -> None:
    """Count the restarts by the kubelet; a pod only has their total."""
    known = context.in_place.get(pod.uid, InPlace(uid=pod.uid)).restarts
    if not context.settings.restarts_in_place or pod.restarts <= known:
        return
    more = pod.restarts - known
    context.in_place[pod.uid] = InPlace(uid=pod.uid, restarts=pod.restarts)
    context.restarts += more
    if pod.crash is None or pod.crash.exit_code != 0:
        context.failures += more
    code = pod.crash.exit_code if pod.crash else "unknown"
    text = f"{pod.name} was restarted in place {pod.restarts} times; the last exit code is {code}"
    if pod.crash is not None and pod.crash.exit_code != 0:
        said = ending_text(pod.crash)
        cause = f"{pod.name} on {pod.node}: {said}"
        context.last_failure = IncidentStatus(cause=cause, time=as_time(context.now_s))
    context.report("Warning", "RestartedInPlace", text)


def count_lost(context: DecisionContext, pod: Judged) -> None:
    """Count a pod whose node is lost as a disruption, if it is not counted yet."""
    if pod.uid not in context.counted:
        context.counted[pod.uid] = None
        context.disruptions += 1
        context.restarts += 1
        _note_early_end(context, pod, "NodeLost", lived_s=None)
        _charge_node(context, pod.node)
    context.report("Warning", "NodeLost", f"{pod.name} was on {pod.node}, which is lost: fenced")


def _note_early_end(
    context: DecisionContext, pod: Judged, why: str, *, lived_s: float | None
) -> None:
    """Delay the next pod of the index if pods of it end quickly again and again."""
    before = context.early_ends.get(pod.index, EarlyEnd(index=pod.index))
    is_quick = lived_s is None or lived_s < QUICK_S
    quick = before.quick + 1 if is_quick else 0
    pause_s = 0.0
    if quick >= 2:
        pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(quick - 2, 16))
    # Rounded up: the time is kept in whole seconds, and a pause must not become shorter.
    not_before = as_time(context.now_s + pause_s + 0.999) if pause_s else None
    context.early_ends[pod.index] = EarlyEnd(
        index=pod.index, quick=quick, waiting=True, not_before=not_before, node=pod.node, why=why
    )


def _charge_node(context: DecisionContext, name: str, *, unfit: bool = False) -> None:
    """Count a failure on a node."""
    if name:
        before = context.nodes.pop(name, NodeFailures(name=name))
        context.nodes[name] = NodeFailures(
            name=name, failures=before.failures + 1, unfit=before.unfit or unfit
        )


def avoided(context: DecisionContext) -> list[str]:
    """Return the nodes in quarantine."""
    rule = context.settings.spec.node_quarantine
    if rule is None:
        return []
    nodes = context.nodes.values()
    return sorted(one.name for one in nodes if one.unfit or one.failures >= rule.failures)


def unfit(context: DecisionContext) -> list[str]:
    """Return the nodes of which an agent said that they cannot take part."""
    return sorted(one.name for one in context.nodes.values() if one.unfit)


def _heal(context: DecisionContext) -> None:
    """Forget early ends of an index once a pod of it has run for QUICK_S; note when one runs."""
    for pod in context.own:
        early = context.early_ends.get(pod.index)
        if early is None or pod.state != "running" or pod.is_leaving:
            continue
        since_s = pod.running_since_s
        if since_s is not None and context.now_s - since_s >= QUICK_S:
            del context.early_ends[pod.index]
        elif early.waiting:
            context.early_ends[pod.index] = msgspec.structs.replace(
                early, waiting=False, not_before=None
            )


def _check_limit(context: DecisionContext) -> None:
    limit = context.settings.spec.backoff_limit
    if limit is not None and context.failures > limit and context.ended_well_time is None:
        text = f"{context.failures} failures; backoffLimit allows {limit}"
        context.end("Failed", "BackoffLimitExceeded", text)


def _forget(context: DecisionContext) -> None:
    """Drop the oldest entries of each list beyond its bound."""
    present = {pod.uid for pod in context.pods}
    for uid in [uid for uid in context.counted if uid not in present][:-COUNTED_KEPT]:
        del context.counted[uid]
    context.in_place = {uid: one for uid, one in context.in_place.items() if uid in present}
    for name in list(context.nodes)[: -NODES_KEPT or None]:
        del context.nodes[name]


def pause_ends_s(context: DecisionContext, index: int) -> float | None:
    """Return until when the next pod of an index has to wait; None if it may start now."""
    early = context.early_ends.get(index)
    at_s = since_epoch(early.not_before) if early else None
    return at_s if at_s is not None and at_s > context.now_s else None
