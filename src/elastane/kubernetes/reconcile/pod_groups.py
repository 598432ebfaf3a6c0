"""The pod group of a job, by which a scheduler places the pods of its minimum together.

| podGroup | object | a pod is in it by |
|---|---|---|
| Coscheduling | PodGroup of scheduling.x-k8s.io | label scheduling.x-k8s.io/pod-group |
| Kubernetes | PodGroup of scheduling.k8s.io | spec.schedulingGroup |
| Volcano | PodGroup of scheduling.volcano.sh | annotation scheduling.k8s.io/group-name |

The minimum of the group is that of the job, not its wanted number of pods. So the job begins with
minReplicas, and pods beyond them are scheduled one by one. The group follows edits of the minimum,
except in the first version of Kubernetes' own API (1.36), whose groups cannot be changed.

A group counts only pods that name it, and pods keep what they name. Two kinds at once would be two
groups that are too small, and a replacement of a lost pod would wait for ever. So the kind of the
living pods counts, and an edit of it applies once no pod lives.

KAI is missing on purpose: its pod grouper puts each owned pod into a group of its own making
(v0.13.0, read 2026-11-29), and for an owner that it does not know the minimum of that group is 1.
"""

from __future__ import annotations

from typing import Any

from elastane.kubernetes.model.names import POD_GROUP, POD_GROUP_APIS, pod_group_kind
from elastane.kubernetes.reconcile.context import DecisionContext

_Part = dict[str, Any]
_UNCHANGEABLE = "scheduling.k8s.io/v1alpha2"
# Fields that a patch of a group removes where its manifest lacks them.
OPTIONAL = ("queue", "priorityClassName", "scheduleTimeoutSeconds")
_BY_KIND = {
    pod_group_kind(api): name for name, versions in POD_GROUP_APIS.items() for api in versions
}


def group_of(context: DecisionContext) -> str:
    """Return the kind of the job's pod group, as in spec.schedulingPolicy.podGroup; "" for none."""
    wanted = _wanted(context)
    for pod in context.own:
        if pod.lives and not pod.is_leaving:
            known = pod.meta.annotations.get(POD_GROUP, "")
            return known if known in POD_GROUP_APIS else ""
    return wanted


def _wanted(context: DecisionContext) -> str:
    policy = context.settings.spec.scheduling_policy
    return (policy.pod_group if policy else None) or ""


def report_kept_group(context: DecisionContext) -> None:
    """Report an edit of podGroup that waits for the end of the living pods."""
    wanted, kept = _wanted(context), group_of(context)
    if wanted != kept:
        text = f"schedulingPolicy.podGroup = {wanted or '(not set)'}: the living pods are in"
        text += f" {'a group of ' + kept if kept else 'no group'}, and new ones join them"
        text += "; next: set spec.suspend to true, wait for their end, and set it to false"
        context.report("Warning", "PodGroupKept", text, count=1)


def api_of(context: DecisionContext, name: str) -> str:
    """Return the API of the kind of groups; "" if none is served, which is reported."""
    unserved = context.seen.unserved
    versions = POD_GROUP_APIS[name]
    served = [api for api in versions if pod_group_kind(api) not in unserved]
    if served:
        return served[0]
    why = unserved[pod_group_kind(versions[0])]
    text = f"schedulingPolicy.podGroup is {name}, and its API cannot be used: {why}"
    text += f"; next: install {versions[0]}, apply the operator's rights again, or remove podGroup"
    context.shortfalls.append(("PodGroupUnavailable", text))
    context.report("Warning", "PodGroupUnavailable", text, count=1)
    return ""


def group_spec(context: DecisionContext, name: str) -> _Part:
    """Return the spec of the job's group."""
    settings = context.settings
    policy = settings.spec.scheduling_policy
    # More than replicas could never be scheduled.
    asked = policy.min_available if policy else None
    least = min(settings.desired, asked or settings.min)
    if name == "Kubernetes":
        return {"schedulingPolicy": {"gang": {"minCount": least}}}
    made: _Part = {"minMember": least}
    if name == "Volcano":
        made["queue"] = policy.queue if policy else None
        made["priorityClassName"] = settings.template["spec"].get("priorityClassName")
    else:
        made["scheduleTimeoutSeconds"] = policy.schedule_timeout_seconds if policy else None
    return {key: value for key, value in made.items() if value is not None}


def may_change(api: str) -> bool:
    """Whether the API lets the minimum of a group be changed."""
    return api != _UNCHANGEABLE


def put_into(manifest: _Part, name: str, job: str) -> None:
    """Put a pod into the group of its job."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    metadata["annotations"][POD_GROUP] = name
    if name == "Coscheduling":
        metadata["labels"]["scheduling.x-k8s.io/pod-group"] = job
    elif name == "Kubernetes":
        spec["schedulingGroup"] = {"podGroupName": job}
    else:
        metadata["annotations"]["scheduling.k8s.io/group-name"] = job
        spec.setdefault("schedulerName", "volcano")


def kind_in(kind: str) -> str:
    """Return the kind of group, as in podGroup, that the kind of an object is; "" for none."""
    return _BY_KIND.get(kind, "")
