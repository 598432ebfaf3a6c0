"""A pod of the job, made of the user's template.

The template is kept as it is but for what the operator owns: names, labels, owner, restart
policy, host name, the injected arguments and variables, and the nodes that are to be avoided.
Running pods are never changed in place: an edit of the template counts for pods that are made
later (`replacing` says which pods an edit replaces).
"""

from __future__ import annotations

import copy
from typing import Any

from elastane.kubernetes.model import Meta
from elastane.kubernetes.model.names import API_VERSION, KIND, TEMPLATE_OF, pod_labels, pod_name
from elastane.kubernetes.reconcile.bounds import GRACE_S
from elastane.kubernetes.reconcile.injection import arguments, variables
from elastane.kubernetes.reconcile.settings import JobSettings

# Same as the pod restart policy of Kubernetes, but for ExitCode, which is the operator's.
_POD_POLICY = {"ExitCode": "Never"}
Manifest = dict[str, Any]


def owner(job: Meta) -> Manifest:
    """Return the owner reference that makes an object the job's."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_manifest(
    job: Meta, settings: JobSettings, index: int, *, name: str, avoid: Manifest, account: str
) -> Manifest:
    """Return pod `index`. `avoid`: a node affinity or {}; `account`: a service account or ""."""
    template = copy.deepcopy(settings.template)
    metadata = template.get("metadata") or {}
    spec = template["spec"]
    spec["restartPolicy"] = _POD_POLICY.get(settings.policy, settings.policy)
    # Stable for each index, also where a replacement has another name.
    spec["hostname"] = pod_name(job.name, index)
    spec["subdomain"] = job.name
    spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if account:
        spec["serviceAccountName"] = account
    if avoid:
        spec["affinity"] = _with(spec.get("affinity"), avoid)
    worker = next(one for one in spec["containers"] if one["name"] == settings.container)
    worker["args"] = [*arguments(job, settings), *settings.arguments]
    worker["env"] = _variables(worker.get("env") or [], variables(job, settings))
    # Without a message the pod's status has the end of the log, which is deleted with the pod.
    worker.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": (metadata.get("labels") or {}) | pod_labels(job.name, index),
            "annotations": (metadata.get("annotations") or {})
            | {TEMPLATE_OF: settings.template_of},
            "ownerReferences": [owner(job)],
        },
        "spec": spec,
    }


def _variables(given: list[Manifest], ours: list[Manifest]) -> list[Manifest]:
    """Return ours first, so that a user's may refer to them, and not those that the user names."""
    named = {variable["name"] for variable in given}
    return [*(variable for variable in ours if variable["name"] not in named), *given]


def affinity(avoided: list[str], unfit: list[str]) -> Manifest:
    """Return the node affinity that keeps pods off some nodes; {} where there are none.

    Those in quarantine are forbidden; a node that is merely unfit is taken where there is no
    other. By the name of the node, not by its host name label, which may differ from it.
    """
    made: Manifest = {}
    if avoided:
        made["required"] = _not_in(avoided)
    others = [name for name in unfit if name not in avoided]
    if others:
        made["preferred"] = _not_in(others)
    return made


def _not_in(nodes: list[str]) -> list[Manifest]:
    # A field requirement holds exactly one value.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _with(given: Manifest | None, avoid: Manifest) -> Manifest:
    """Add what is to be avoided to the user's affinity, whose terms are alternatives."""
    made = dict(given or {})
    node = dict(made.get("nodeAffinity") or {})
    if "required" in avoid:
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (node.get(key) or {}).get("nodeSelectorTerms") or [{}]
        node[key] = {
            "nodeSelectorTerms": [
                term | {"matchFields": [*(term.get("matchFields") or []), *avoid["required"]]}
                for term in terms
            ]
        }
    if "preferred" in avoid:
        key = "preferredDuringSchedulingIgnoredDuringExecution"
        wish = {"weight": 100, "preference": {"matchFields": avoid["preferred"]}}
        node[key] = [*(node.get(key) or []), wish]
    made["nodeAffinity"] = node
    return made
