"""Pods of lost nodes: when a node is lost, and the fencing of its pods before their replacement.

A pod on an unreachable node may run on. So its uid goes into the job's directive first; a
coordinator that has read it neither lets the pod rejoin nor publish. Once the directive is seen to
hold the uid, and not before, the pod is deleted by force and replaced.

A node is lost in one of three cases. It was deleted. Or it is unreachable, and the job's
coordinator later reports that it has lost the pod as well. Or it has been unreachable for
nodeLostSeconds, and the coordinator does not report the pod as alive.

So a cluster whose control plane cannot reach its nodes, while these reach one another, trains on.
Where the coordinator cannot report either, and all of several nodes are unreachable, the operator
waits for ALL_LOST_S.
"""

from __future__ import annotations

from elastane.kubernetes.bridge.messages import JobReport, directive_name
from elastane.kubernetes.reconcile.bounds import ALL_LOST_S, FENCED_KEPT, REPORT_FRESH_S
from elastane.kubernetes.reconcile.context import Draft
from elastane.kubernetes.reconcile.ledger import charge_node, note_early_end
from elastane.kubernetes.reconcile.pods import Judged


def fence(draft: Draft, *, counting: bool) -> None:
    """Fence pods of lost nodes; delete by force those whose fence is in the directive.

    Without `counting`, as in a job that has ended, counters stay as they are.
    """
    known = {pod.uid for pod in draft.pods}
    patience_s = _patience_s(draft)
    lost = [pod for pod in draft.own if not pod.is_over and _is_lost(draft, pod, patience_s)]
    for pod in lost:
        draft.fenced[pod.uid] = None
        if counting:
            _count(draft, pod)
    # Of those that are gone from the API server the newest are kept: their processes may live.
    gone = [uid for uid in draft.fenced if uid not in known]
    for uid in gone[:-FENCED_KEPT]:
        del draft.fenced[uid]
    for pod in draft.pods:
        if pod.uid in draft.fenced and is_fenced_for_all(draft, pod.uid):
            draft.dismiss(pod, f"its node {pod.node} is lost, and it is fenced", grace_s=0)


def is_fenced_for_all(draft: Draft, uid: str) -> bool:
    """Whether the directive that the job reads is seen to fence a pod."""
    name = directive_name(draft.job.name)
    for owned in draft.seen.objects:
        if owned.kind == "ConfigMap" and owned.metadata.name == name:
            return uid in owned.data.get("fenced", "").split()
    return False


def _is_lost(draft: Draft, pod: Judged, patience_s: float) -> bool:
    if not pod.node:
        return False
    node = draft.node(pod.node)
    if not node.exists:
        return True
    since_s = node.unreachable_since_s
    if since_s is None:
        return False
    state = _said_of(draft.seen.report, pod.uid, since_s, draft.now_s)
    if state == "departed":
        return True
    lost_at_s = since_s + patience_s
    if state == "joined":
        lost_at_s = max(lost_at_s, draft.now_s + REPORT_FRESH_S)
    draft.wake(lost_at_s)
    return lost_at_s <= draft.now_s


def _patience_s(draft: Draft) -> float:
    """Return how long an unreachable node is waited for."""
    patience_s: float = draft.settings.spec.node_lost_seconds
    names = {pod.node for pod in draft.own if pod.node and not pod.is_over}
    nodes = [draft.node(name) for name in names]
    if len(nodes) > 1 and all(node.unreachable_since_s is not None for node in nodes):
        return max(patience_s, ALL_LOST_S)
    return patience_s


def _said_of(report: JobReport | None, uid: str, since_s: float, now_s: float) -> str:
    """Return what the coordinator said of a pod since its node is unreachable."""
    if report is None or report.at_s < since_s or report.at_s < now_s - REPORT_FRESH_S:
        return ""
    return next((member.state for member in report.members if member.pod == uid), "")


def _count(draft: Draft, pod: Judged) -> None:
    if pod.uid not in draft.counted:
        draft.counted[pod.uid] = None
        draft.disruptions += 1
        draft.restarts += 1
        note_early_end(draft, pod, "NodeLost", lived_s=None)
        charge_node(draft, pod.node)
    draft.tell("Warning", "NodeLost", f"{pod.name} was on {pod.node}, which is lost: fenced")
