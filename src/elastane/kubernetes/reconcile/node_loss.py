"""Pods of lost nodes: when a node is lost, and the fencing of its pods before their replacement.

A pod on an unreachable node may still run. So its uid is first written into the job's directive,
after which the coordinator lets the pod neither rejoin nor publish. The pod is deleted by force and
replaced only after the operator has read the uid back from the directive.

A node is lost in one of three cases. It was deleted. Or it is unreachable, and the job's
coordinator later reports that it has lost the pod as well. Or it has been unreachable for
nodeLostSeconds, and the coordinator does not report the pod as alive.

So a job continues if the control plane cannot reach the nodes while these reach one another. If all
of several nodes are unreachable and the coordinator cannot report either, the operator waits for
ALL_LOST_S.
"""

from __future__ import annotations

from elastane.kubernetes.model.observed import JobReport, directive_name
from elastane.kubernetes.reconcile.bounds import ALL_LOST_S, FENCED_KEPT, REPORT_FRESH_S
from elastane.kubernetes.reconcile.context import DecisionContext
from elastane.kubernetes.reconcile.ledger import count_lost
from elastane.kubernetes.reconcile.pods import Judged


def fence(context: DecisionContext, *, counting: bool) -> None:
    """Fence pods of lost nodes; delete a fenced pod by force once the directive has its uid.

    Without `counting`, as in a job that has ended, counters stay as they are.
    """
    known = {pod.uid for pod in context.pods}
    patience_s = _patience_s(context)
    lost = [pod for pod in context.own if not pod.is_over and _is_lost(context, pod, patience_s)]
    for pod in lost:
        context.fenced[pod.uid] = None
        if counting:
            count_lost(context, pod)
    # Uids of the newest deleted pods are kept, since processes of these pods may still run.
    gone = [uid for uid in context.fenced if uid not in known]
    for uid in gone[:-FENCED_KEPT]:
        del context.fenced[uid]
    for pod in context.pods:
        if pod.uid in context.fenced and is_fenced_for_all(context, pod.uid):
            context.dismiss(pod, f"its node {pod.node} is lost, and it is fenced", grace_s=0)


def is_fenced_for_all(context: DecisionContext, uid: str) -> bool:
    """Whether the directive, as the operator has read it, contains the fence of a pod."""
    name = directive_name(context.job.name)
    for owned in context.seen.objects:
        if owned.kind == "ConfigMap" and owned.metadata.name == name:
            return uid in owned.data.get("fenced", "").split()
    return False


def _is_lost(context: DecisionContext, pod: Judged, patience_s: float) -> bool:
    if not pod.node:
        return False
    node = context.node(pod.node)
    if not node.exists:
        return True
    since_s = node.unreachable_since_s
    if since_s is None:
        return False
    state = _reported_state(context.seen.report, pod.uid, since_s, context.now_s)
    if state == "departed":
        return True
    lost_at_s = since_s + patience_s
    if state == "joined":
        lost_at_s = max(lost_at_s, context.now_s + REPORT_FRESH_S)
    context.wake(lost_at_s)
    return lost_at_s <= context.now_s


def _patience_s(context: DecisionContext) -> float:
    """Return how long the operator waits for an unreachable node."""
    patience_s: float = context.settings.spec.node_lost_seconds
    names = {pod.node for pod in context.own if pod.node and not pod.is_over}
    nodes = [context.node(name) for name in names]
    if len(nodes) > 1 and all(node.unreachable_since_s is not None for node in nodes):
        return max(patience_s, ALL_LOST_S)
    return patience_s


def _reported_state(report: JobReport | None, uid: str, since_s: float, now_s: float) -> str:
    """Return the pod's state in a report since its node became unreachable; "" without one."""
    if report is None or report.at_s < since_s or report.at_s < now_s - REPORT_FRESH_S:
        return ""
    return next((member.state for member in report.members if member.pod == uid), "")
