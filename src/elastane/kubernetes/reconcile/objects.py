"""The objects of a job besides its pods: Services, API access, directive and report.

| object | name | when |
|---|---|---|
| Service, headless | `{job}` | always: pods are `{job}-worker-{i}.{job}` |
| Service, headless | `{job}-worker-{i}` | for pods that the manifest names by host |
| ConfigMap | `{job}-directive` | always: bounds, replicas, fenced and dead pods: for the job |
| ConfigMap | `{job}-report` | with access: the coordinator's report |
| Secret | `elastane-{rdzv id}.token` | with the rendezvous over the API server: the job's token |
| ServiceAccount, RoleBinding | `{job}` | with access, unless the template names an account |
| PodGroup | `{job}` | with schedulingPolicy.podGroup, while any pod lives or is wanted |

Access is given where the rendezvous is over the API server: the account is bound to the
ClusterRole `elastane-job`, which the installation makes, so the operator needs no right to change
roles. Pods get their token as a variable, so neither they nor the operator may read Secrets.

A manifest carries a digest of itself, by which an operator of another version sees whether its own
manifest would differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from elastane.kubernetes.model import CreateObject, CreateToken, DeleteObject, Meta, PatchObject
from elastane.kubernetes.model.names import (
    JOB_ROLE,
    MADE_OF,
    job_labels,
    pod_group_kind,
    pod_labels,
    pod_name,
)
from elastane.kubernetes.model.observed import dead_in, directive_name, report_name
from elastane.kubernetes.reconcile.bounds import DEAD_KEPT
from elastane.kubernetes.reconcile.context import DecisionContext, waits_for_refusal
from elastane.kubernetes.reconcile.manifest import (
    Manifest,
    backend,
    named_pods,
    needs_access,
    owner,
    rdzv_id,
)
from elastane.kubernetes.reconcile.pod_groups import (
    OPTIONAL,
    api_of,
    group_of,
    group_spec,
    kind_in,
    may_change,
    report_kept_group,
)
from elastane.kubernetes.store.objects import token_of

_RBAC = "rbac.authorization.k8s.io"


def keep_objects(context: DecisionContext) -> bool:
    """Create, repair and adopt the job's objects; return whether pods may be created now.

    Pods may be created if all objects exist, or if this decision creates them before its pods.
    """
    report_kept_group(context)
    group = group_of(context)
    _drop_groups(context, but=group)
    api = api_of(context, group) if group else ""
    wanted = _wanted(context)
    if api:
        spec = group_spec(context, group)
        wanted.append(_object(context.job, api, "PodGroup", context.job.name, spec=spec))
    return _keep(context, wanted) and bool(api or not group)


def drop_group(context: DecisionContext) -> None:
    """Delete the group of a job without living pods, as of one that is suspended or has ended."""
    if not any(pod.lives for pod in context.pods):
        _drop_groups(context)


def _drop_groups(context: DecisionContext, but: str = "") -> None:
    """Delete the job's groups of other kinds than `but`."""
    for owned in context.seen.objects:
        meta, name = owned.metadata, kind_in(owned.kind)
        is_ours = name and meta.controller == context.job.uid
        if is_ours and name != but and not meta.is_leaving:
            context.act(DeleteObject(kind=owned.kind, name=meta.name, uid=meta.uid))


def keep_directive(context: DecisionContext) -> None:
    """Update the fenced and dead pods in the directive, also after the last pod was created.

    The pods of a suspended job end one by one, and the next coordinator reads which are dead.
    """
    name = directive_name(context.job.name)
    is_there = any(
        (one.kind, one.metadata.name) == ("ConfigMap", name) for one in context.seen.objects
    )
    if is_there or any(pod.uid in context.fenced for pod in context.pods):
        _keep(context, [_directive(context)])


def _keep(context: DecisionContext, wanted: list[Manifest]) -> bool:
    seen = {("Service", one.metadata.name): one.metadata for one in context.seen.services}
    data: dict[str, dict[str, str]] = {}
    for owned in context.seen.objects:
        seen[owned.kind, owned.metadata.name] = owned.metadata
        if owned.kind == "ConfigMap":
            data[owned.metadata.name] = owned.data
    ready = True
    for manifest in wanted:
        kind, name = _kind(manifest), manifest["metadata"]["name"]
        found = seen.get((kind, name))
        if kind == "Secret":
            was_begun = ("ConfigMap", report_name(context.job.name)) in seen
            ready &= _create_token(context, manifest, was_begun)
        elif found is None:
            ready &= _create(context, manifest)
        elif found.controller not in ("", context.job.uid):
            ready &= _replace(context, kind, found)
        else:
            _mend(context, manifest, found, data.get(name))
            # Its scheduler keeps a deleted group until the last pod of it has ended.
            ready &= not (found.is_leaving and kind_in(kind))
    return ready


def _kind(manifest: Manifest) -> str:
    kind: str = manifest["kind"]
    return pod_group_kind(manifest["apiVersion"]) if kind == "PodGroup" else kind


def _create(context: DecisionContext, manifest: Manifest) -> bool:
    kind, name = _kind(manifest), manifest["metadata"]["name"]
    if waits_for_refusal(context, kind, name):
        return False
    context.act(CreateObject(kind=kind, name=name, manifest=manifest))
    return True


def _create_token(context: DecisionContext, manifest: Manifest, was_begun: bool) -> bool:
    """Create the job's token if it is not known to exist; the operator cannot read Secrets.

    The token is created before the report object, so an existing report proves that it was
    created. If a pod lacks its configuration, the token may have been deleted since.
    """
    name = manifest["metadata"]["name"]
    lacks = any(pod.lacks_configuration for pod in context.own)
    if was_begun and not lacks:
        return True
    if waits_for_refusal(context, "Secret", name):
        return False
    context.act(CreateToken(name=name, manifest=manifest))
    return True


def _replace(context: DecisionContext, kind: str, found: Meta) -> bool:
    """Delete an object of an earlier job of this name; report one that another owner controls."""
    is_leftover = any(
        one.controller and one.kind == "ElasticJob" and one.name == context.job.name
        for one in found.owner_references
    )
    if is_leftover and not found.is_leaving:
        context.act(DeleteObject(kind=kind, name=found.name, uid=found.uid))
    if not is_leftover:
        text = f"{kind} {found.name} belongs to another controller; next: delete or rename it"
        context.shortfalls.append(("NameTaken", text))
        context.report("Warning", "NameTaken", text, count=1)
    return False


def _mend(
    context: DecisionContext, manifest: Manifest, found: Meta, data: dict[str, str] | None
) -> None:
    """Adopt the object and bring it up to date by a patch, if anything differs."""
    if found.is_leaving:
        return
    patch: Manifest = {}
    if not found.controller:
        patch["metadata"] = {"ownerReferences": manifest["metadata"]["ownerReferences"]}
    wanted = manifest.get("data")
    if wanted is not None:
        if data != wanted:
            gone = {key: None for key in data or {} if key not in wanted}
            patch["data"] = wanted | gone
    else:
        made_of = manifest["metadata"]["annotations"][MADE_OF]
        if found.annotations.get(MADE_OF) == made_of or not may_change(manifest["apiVersion"]):
            pass
        elif manifest["kind"] == "RoleBinding":
            # The API server does not allow a change of roleRef. The next decision creates it again.
            context.act(DeleteObject(kind="RoleBinding", name=found.name, uid=found.uid))
            return
        else:
            patch["metadata"] = patch.get("metadata", {}) | {"annotations": {MADE_OF: made_of}}
            patch |= {key: manifest[key] for key in ("spec",) if key in manifest}
            if manifest["kind"] == "PodGroup":
                patch["spec"] = dict.fromkeys(OPTIONAL) | patch["spec"]
    if patch:
        patch["metadata"] = patch.get("metadata", {}) | {"uid": found.uid}
        context.act(PatchObject(kind=_kind(manifest), name=found.name, patch=patch))


def _wanted(context: DecisionContext) -> list[Manifest]:
    job, settings = context.job, context.settings
    made = [_service(job, job.name, job_labels(job.name)), _directive(context)]
    named = named_pods(job, settings)
    indices = context.slots if named is None else sorted(named & set(context.slots))
    for index in indices:
        made.append(_service(job, pod_name(job.name, index), pod_labels(job.name, index)))
    if backend(job, settings) == "kubernetes":
        made.append(_object(job, "v1", "Secret", token_of(rdzv_id(job, settings))))
        made.append(_object(job, "v1", "ConfigMap", report_name(job.name)))
    if needs_access(job, settings):
        made += _access(context)
    return made


def _object(job: Meta, api: str, kind: str, name: str, **parts: Any) -> Manifest:
    digest = hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": job_labels(job.name),
            "annotations": {MADE_OF: digest},
            "ownerReferences": [owner(job)],
        },
        **parts,
    }


def _service(job: Meta, name: str, selected: dict[str, str]) -> Manifest:
    # Names must resolve before a pod is ready: it becomes ready when its agent finds the others.
    spec = {"clusterIP": "None", "selector": selected, "publishNotReadyAddresses": True}
    return _object(job, "v1", "Service", name, spec=spec)


def _directive(context: DecisionContext) -> Manifest:
    settings = context.settings
    data = {
        "min": str(settings.min),
        "max": str(settings.max),
        "replicas": str(settings.desired),
        "fenced": " ".join(context.fenced),
        "dead": " ".join(_dead(context)),
    }
    return _object(context.job, "v1", "ConfigMap", directive_name(context.job.name), data=data)


def _dead(context: DecisionContext) -> list[str]:
    """Return the uids of existing dead pods, and of the newest deleted ones.

    A kubelet has reported their end, so the coordinator does not wait for them to come back
    (`coordinator.rules.admission`).
    """
    name = directive_name(context.job.name)
    known = [
        uid
        for owned in context.seen.objects
        if owned.kind == "ConfigMap" and owned.metadata.name == name
        for uid in dead_in(owned.data)
    ]
    here = sorted(pod.uid for pod in context.own if pod.is_dead)
    gone = dict.fromkeys([*known, *(pod.uid for pod in context.gone if pod.is_dead)])
    # A suspended job loses all of its pods at once.
    kept = max(DEAD_KEPT, context.settings.max)
    return [*[uid for uid in gone if uid not in here][-kept:], *here]


def _access(context: DecisionContext) -> list[Manifest]:
    """Return an account with the rights that agents need to Leases and ConfigMaps.

    For that the operator needs the right to `bind` the one ClusterRole, and no other right.
    """
    job = context.job
    ref = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": JOB_ROLE}
    subject = {"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}
    return [
        _object(job, "v1", "ServiceAccount", job.name),
        _object(job, f"{_RBAC}/v1", "RoleBinding", job.name, roleRef=ref, subjects=[subject]),
    ]
