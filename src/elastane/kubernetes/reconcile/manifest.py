"""Makes a pod of the job from the user's template, with injected arguments and variables.

The operator changes only its own parts of the template: names, labels, owner, restart policy, host
name, the injected arguments and variables, and the nodes that the pod avoids. Running pods are
never changed in place: an edit of the template applies to later pods (`running` decides which pods
an edit replaces).

Four arguments are injected into the worker container, in the order and spelling of the original
TorchElastic controller. They come before the user's own arguments: of two with the same name a
launcher takes the last, so a user can override each. The rendezvous id is the job's name and the
beginning of its uid. So a new job of an old name never uses records of the earlier job, even in the
user's own etcd (pytorch/elastic #151).

| rdzvEndpoint | launcher | backend | endpoint |
|---|---|---|---|
| not set | elastane | kubernetes | the namespace |
| not set | torchrun | c10d | `{job}-worker-0.{job}:29400` |
| a pod of the job | any | c10d | as given |
| anything else | any | etcd (or rdzvBackend) | as given |
"""

from __future__ import annotations

import copy
import re
from typing import Any

from elastane.kubernetes.model import Meta
from elastane.kubernetes.model.names import API_VERSION, KIND, TEMPLATE_OF, pod_labels, pod_name
from elastane.kubernetes.reconcile.bounds import GRACE_S
from elastane.kubernetes.reconcile.settings import JobSettings
from elastane.kubernetes.store.objects import token_of

C10D_PORT = 29400
UID_CHARS = 8
# The key of the token in its Secret; agents that create a Secret use the same.
TOKEN_KEY = "value"
_NAMES_ID = re.compile(r"--rdzv[_-]id(?:=(.*)|$)", re.DOTALL)


def rdzv_id(job: Meta, settings: JobSettings) -> str:
    """Return the rendezvous id of a job: the user's, if the arguments have one."""
    given = settings.arguments
    for place, word in enumerate(given):
        found = _NAMES_ID.match(word)
        if found:
            value = found[1] if found[1] is not None else "".join(given[place + 1 : place + 2])
            return value or _own_id(job)
    return _own_id(job)


def _own_id(job: Meta) -> str:
    return f"{job.name}-{job.uid[:UID_CHARS]}"


def backend(job: Meta, settings: JobSettings) -> str:
    """Return the rendezvous backend; see the table above."""
    spec = settings.spec
    if spec.rdzv_backend:
        return spec.rdzv_backend
    if spec.rdzv_endpoint:
        names_a_pod = re.match(rf"{re.escape(job.name)}-worker-\d+([.:]|$)", spec.rdzv_endpoint)
        return "c10d" if names_a_pod else "etcd"
    return "kubernetes" if spec.launcher == "elastane" else "c10d"


def _endpoint(job: Meta, settings: JobSettings) -> str:
    if settings.spec.rdzv_endpoint:
        return settings.spec.rdzv_endpoint
    if backend(job, settings) == "kubernetes":
        return job.namespace
    return f"{pod_name(job.name, 0)}.{job.name}:{C10D_PORT}"


def arguments(job: Meta, settings: JobSettings) -> list[str]:
    """Return the injected arguments, which come before the user's own."""
    made = [
        f"--rdzv_backend={backend(job, settings)}",
        f"--rdzv_endpoint={_endpoint(job, settings)}",
    ]
    if not any(_NAMES_ID.match(word) for word in settings.arguments):
        made.append(f"--rdzv_id={_own_id(job)}")
    made.append(f"--nnodes={settings.min}:{settings.max}")
    if settings.spec.spares:
        made.append(f"--spares-per-node={settings.spec.spares}")
    return made


def variables(job: Meta, settings: JobSettings) -> list[dict[str, Any]]:
    """Return the variables by which an agent of elastane identifies itself, and one for torchrun.

    Without torchrun's variable, a pod that joins a running c10d job of torch 2.4 to 2.13 ends that
    job after 60 s. It is always set, since any rdzvEndpoint may be used with an image of torchrun.
    """
    made = [
        _field("ELASTANE_POD_UID", "metadata.uid"),
        _field("ELASTANE_POD_NAME", "metadata.name"),
        {"name": "ELASTANE_ELASTICJOB", "value": job.name},
        {"name": "ELASTANE_TERMINATION_LOG", "value": settings.termination_log},
    ]
    if backend(job, settings) == "kubernetes":
        token = {"name": token_of(rdzv_id(job, settings)), "key": TOKEN_KEY}
        made.append({"name": "ELASTANE_TOKEN", "valueFrom": {"secretKeyRef": token}})
    if settings.spec.launcher == "torchrun" or settings.spec.rdzv_endpoint:
        made.append({"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"})
    return made


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def needs_access(job: Meta, settings: JobSettings) -> bool:
    """Whether the pods need access to the API server by a service account that we create."""
    given = settings.template["spec"]
    named = given.get("serviceAccountName") or given.get("serviceAccount")
    return backend(job, settings) == "kubernetes" and not named


def named_pods(job: Meta, settings: JobSettings) -> set[int] | None:
    """Return the indices of pods whose host names the manifest contains; None: all.

    Each of these pods gets a Service; the original controller made one for every pod.
    """
    said = [settings.spec.rdzv_endpoint or ""]
    for container in settings.template["spec"]["containers"]:
        said += container.get("command") or []
        said += container.get("args") or []
        said += [one.get("value") or "" for one in container.get("env") or []]
    text = "\n".join(said)
    found = re.findall(rf"(?<![\w.-]){re.escape(job.name)}-worker-(\d*)", text)
    if "" in found:
        return None
    return {int(index) for index in found if len(index) <= 6}


# The pod's restart policy is the job's, except for ExitCode, which only the operator knows.
_POD_POLICY = {"ExitCode": "Never"}
Manifest = dict[str, Any]


def owner(job: Meta) -> Manifest:
    """Return the owner reference of an object that belongs to the job."""
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
    # The host name is that of the index, also if a replacement has another pod name.
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
    # Without a termination message the pod's status gets the end of the log.
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
    """Return our variables, then the user's, which may refer to ours and override them."""
    named = {variable["name"] for variable in given}
    return [*(variable for variable in ours if variable["name"] not in named), *given]


def affinity(avoided: list[str], unfit: list[str]) -> Manifest:
    """Return the node affinity that keeps pods off some nodes; {} if there are none.

    Nodes in quarantine are forbidden; an unfit node is only used if there is no other. The rules
    use the node's name, since its host name label may differ from it.
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
    """Add the avoided nodes to each term of the user's affinity, since terms are alternatives."""
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
