"""Manifests for people to apply: the operator with its rights, and a small ElasticJob.

Pure: from a few values to objects in the order in which they must be applied. The rights are the
fewest that the operator can work with; each line of RIGHTS states its purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastane.kubernetes.model.names import (
    API_VERSION,
    CONTAINER,
    GROUP,
    JOB_ROLE,
    KIND,
    PLURAL,
    POD_GROUP_APIS,
    TEMPLATE_PLURAL,
)
from elastane.kubernetes.schema import definitions

Object = dict[str, Any]
_WORD = re.compile(r"[A-Za-z/-][A-Za-z0-9 ./_(),;=+-]*")
_NO_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "-"}
NAME = "elastane-operator"
METRICS_PORT = 8080
_RBAC = "rbac.authorization.k8s.io"
_POD_GROUPS = {name: apis[0].split("/")[0] for name, apis in POD_GROUP_APIS.items()}
# (group, resources, verbs, purpose). The operator may create Secrets and read none. It may bind one
# ClusterRole and change none. So an attacker with its account learns no secret, and gets no right
# that ElasticJobs do not have.
RIGHTS = (
    (
        GROUP,
        (PLURAL,),
        ("get", "list", "watch", "patch", "delete"),
        "to see jobs, to write the specs of those that name a template, and to remove old ones",
    ),
    (GROUP, (TEMPLATE_PLURAL,), ("get",), "to make jobs of them"),
    (GROUP, (f"{PLURAL}/status",), ("patch", "update"), "to say how they are"),
    # Some clusters require this right for owner references that block the owner's deletion.
    (GROUP, (f"{PLURAL}/finalizers",), ("update",), "to own what belongs to them"),
    ("", ("pods",), ("get", "list", "watch", "create", "patch", "delete"), "to run them"),
    ("", ("services",), ("get", "list", "watch", "create", "patch", "delete"), "to name pods"),
    (
        "",
        ("configmaps",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "to speak with a job's coordinator",
    ),
    ("", ("serviceaccounts",), ("get", "list", "watch", "create", "patch", "delete"), "of jobs"),
    (
        _RBAC,
        ("rolebindings",),
        ("get", "list", "watch", "create", "patch", "delete"),
        "to give the accounts of jobs their role",
    ),
    ("", ("secrets",), ("create",), "to give each job its token"),
    ("", ("events",), ("get", "create", "patch"), "to report what was done"),
    (
        "coordination.k8s.io",
        ("leases",),
        ("get", "create", "patch"),
        "to elect the operator that acts, and to free the lease of a dead coordinator",
    ),
    *(
        (
            group,
            ("podgroups",),
            ("get", "list", "watch", "create", "patch", "delete"),
            f"to have pods scheduled together, schedulingPolicy.podGroup {name}",
        )
        for name, group in _POD_GROUPS.items()
    ),
)
# The rights of a job's agents; the account of each job is bound to the ClusterRole with these.
JOB_RIGHTS = (
    (
        "",
        ("configmaps",),
        ("get", "list", "watch", "create", "update", "patch", "delete"),
        "the coordinator's address and record, the directive and the report",
    ),
    (
        "coordination.k8s.io",
        ("leases",),
        ("get", "list", "watch", "create", "update", "patch", "delete"),
        "to elect the coordinator",
    ),
)
_READ = ("get", "list", "watch")
_EDIT = (*_READ, "create", "update", "patch", "delete", "deletecollection")
# Kubernetes adds these to its own roles for users: (name, roles that they are added to, rights).
USER_ROLES = (
    (
        "elastane-jobs-edit",
        ("edit", "admin"),
        (
            (GROUP, (PLURAL,), _EDIT, "jobs"),
            (GROUP, (f"{PLURAL}/scale",), ("get", "update", "patch"), "kubectl scale"),
            (GROUP, (f"{PLURAL}/status",), _READ, "how jobs are"),
            (GROUP, (TEMPLATE_PLURAL,), _READ, "what jobs may be made of"),
        ),
    ),
    ("elastane-templates-edit", ("admin",), ((GROUP, (TEMPLATE_PLURAL,), _EDIT, "templates"),)),
    (
        "elastane-jobs-view",
        ("view",),
        (
            (GROUP, (PLURAL, f"{PLURAL}/status", f"{PLURAL}/scale"), _READ, "jobs"),
            (GROUP, (TEMPLATE_PLURAL,), _READ, "what jobs may be made of"),
        ),
    ),
)
NODE_RIGHTS = (("", ("nodes",), ("get", "list", "watch"), "to know which are lost"),)
Right = tuple[str, tuple[str, ...], tuple[str, ...], str]


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an operator's installation. `watch_namespace` "": all namespaces.

    `with_rules`: the resource's definition has rules between fields (Kubernetes 1.25 and later).
    """

    namespace: str
    image: str
    watch_namespace: str = ""
    replicas: int = 1
    with_rules: bool = True


def installation(wanted: Installation) -> list[Object]:
    """Return namespace, definitions, rights, Service and Deployment of an operator."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": wanted.namespace, "labels": _labels()},
        },
        *definitions(with_rules=wanted.with_rules),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(wanted.namespace)},
        *_rights(wanted),
        *roles_for_jobs(),
        _metrics_service(wanted),
        _deployment(wanted),
    ]


def roles_for_jobs() -> list[Object]:
    """Return the ClusterRoles of the cluster: that of jobs' accounts, and those for users."""
    made = [cluster_role(JOB_ROLE, JOB_RIGHTS)]
    for name, into, rights in USER_ROLES:
        aggregated = {f"{_RBAC}/aggregate-to-{role}": "true" for role in into}
        made.append(cluster_role(name, rights, aggregated))
    return made


def cluster_role(
    name: str, rights: Sequence[Right], labels: Mapping[str, str] | None = None
) -> Object:
    """Return a ClusterRole of these rights."""
    return {
        "kind": "ClusterRole",
        "apiVersion": f"{_RBAC}/v1",
        "metadata": {"name": name, "labels": _labels() | dict(labels or {})},
        "rules": rules_of(rights),
    }


def _rights(wanted: Installation) -> list[Object]:
    """Return rights to jobs in one namespace or in all, and rights to the cluster's nodes."""
    lease: Right = ("coordination.k8s.io", ("leases",), ("get", "create", "patch"), "its own")
    if not wanted.watch_namespace:
        return _granted(wanted, "", RIGHTS + NODE_RIGHTS)
    # Names of cluster-wide objects contain the namespace, since others may have operators too.
    nodes = f"{NAME}-{wanted.watch_namespace}"
    found = _granted(wanted, wanted.watch_namespace, RIGHTS)
    found += _granted(wanted, "", NODE_RIGHTS, nodes)
    if wanted.watch_namespace != wanted.namespace:
        found += _granted(wanted, wanted.namespace, (lease,))
    return found


def _granted(
    wanted: Installation, namespace: str, rights: Sequence[Right], name: str = NAME
) -> list[Object]:
    kind = "Role" if namespace else "ClusterRole"
    rules = rules_of(rights)
    if rights[: len(RIGHTS)] == RIGHTS:
        rules.append(_BIND)
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": wanted.namespace}
    head = {"apiVersion": f"{_RBAC}/v1", "metadata": _meta(namespace) | {"name": name}}
    return [
        {"kind": kind, **head, "rules": rules},
        {
            "kind": f"{kind}Binding",
            **head,
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


# The only role that the operator may bind to an account.
_BIND = {
    "apiGroups": [_RBAC],
    "resources": ["clusterroles"],
    "resourceNames": [JOB_ROLE],
    "verbs": ["bind"],
}


def rules_of(rights: Sequence[Right]) -> list[Object]:
    """Return rights as the rules of a role."""
    return [
        {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
        for group, resources, verbs, _ in rights
    ]


def _metrics_service(wanted: Installation) -> Object:
    """Return the Service by which Prometheus finds the operators."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(wanted.namespace),
        "spec": {
            "clusterIP": "None",
            "selector": _labels(),
            "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"}],
        },
    }


def _deployment(wanted: Installation) -> Object:
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            # The image names the user: OpenShift gives each namespace a range of its own, and
            # refuses pods that ask for another.
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 15,
        "containers": [_container(wanted)],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(wanted.namespace),
        "spec": {
            "replicas": wanted.replicas,
            "selector": {"matchLabels": _labels()},
            "template": {"metadata": {"labels": _labels()}, "spec": pod},
        },
    }


def _container(wanted: Installation) -> Object:
    words = ["kubernetes", "operator", f"--metrics-port={METRICS_PORT}"]
    if wanted.watch_namespace:
        words.append(f"--namespace={wanted.watch_namespace}")
    return {
        "name": "operator",
        "image": wanted.image,
        "command": ["elastane"],
        "args": [*words, f"--lease-namespace={wanted.namespace}"],
        "env": [
            {"name": "ELASTANE_POD_NAME", "valueFrom": _field("metadata.name")},
            # The root file system is read-only, so Python must write no compiled modules.
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "livenessProbe": _probe("/healthz", 20),
        "readinessProbe": _probe("/readyz", 5),
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _probe(path: str, period_s: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }


def _field(path: str) -> Object:
    return {"fieldRef": {"fieldPath": path}}


def _labels() -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME}


def _meta(namespace: str) -> Object:
    return {
        "name": NAME,
        **({"namespace": namespace} if namespace else {}),
        "labels": _labels(),
    }


class Volume(msgspec.Struct, frozen=True):
    """A volume of a job's pods: its source, and where it is mounted."""

    name: str
    source: Mapping[str, Any]
    path: str
    read_only: bool = False


class RequestedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an ElasticJob that a user asks for; None means the default."""

    name: str
    image: str
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    namespace: str = ""
    replicas: int = 1
    min: int | None = None
    max: int | None = None
    fields: Mapping[str, Any] = {}
    env: tuple[Object, ...] = ()
    volumes: tuple[Volume, ...] = ()
    limits: Mapping[str, str] = {}
    requests: Mapping[str, str] = {}


def job(requested: RequestedJob) -> Object:
    """Return the ElasticJob; `fields` has further fields of its spec by their names there."""
    container: Object = {
        "name": CONTAINER,
        "image": requested.image,
        **({"command": list(requested.command)} if requested.command else {}),
        **({"args": list(requested.args)} if requested.args else {}),
        **({"env": list(requested.env)} if requested.env else {}),
        **_resources(requested),
    }
    pod: Object = {"containers": [container]}
    if requested.volumes:
        container["volumeMounts"] = [
            {
                "name": one.name,
                "mountPath": one.path,
                **({"readOnly": True} if one.read_only else {}),
            }
            for one in requested.volumes
        ]
        pod["volumes"] = [{"name": one.name, **one.source} for one in requested.volumes]
    bounds = {"minReplicas": requested.min, "maxReplicas": requested.max}
    place = {"namespace": requested.namespace} if requested.namespace else {}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": requested.name, **place},
        "spec": {
            **{key: value for key, value in bounds.items() if value is not None},
            **requested.fields,
            "replicaSpecs": {
                "Worker": {"replicas": requested.replicas, "template": {"spec": pod}},
            },
        },
    }


def job_of_template(
    name: str, namespace: str, ref: Mapping[str, Any], *, is_suspended: bool
) -> Object:
    """Return an ElasticJob whose spec the operator makes of a template; `ref`: its templateRef."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "spec": {"templateRef": dict(ref), **({"suspend": True} if is_suspended else {})},
    }


def _resources(requested: RequestedJob) -> Object:
    both = {"limits": dict(requested.limits), "requests": dict(requested.requests)}
    said = {key: value for key, value in both.items() if value}
    return {"resources": said} if said else {}


def as_yaml(documents: Sequence[Object]) -> str:
    """Return documents as YAML that every reader decodes to the same types.

    Without PyYAML it is JSON, which is YAML too.
    """
    try:
        import yaml
    except ImportError:
        return "".join(f"---\n{json.dumps(one, indent=2)}\n" for one in documents)

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """PyYAML's dumper, which also quotes texts that another reader takes for another type."""

    Dumper.add_representer(str, _represented)
    options = {"sort_keys": False, "explicit_start": True, "width": 100}
    dumped: str = yaml.dump_all(documents, Dumper=Dumper, **options)
    return dumped


def _represented(dumper: Any, text: str) -> Any:
    """Quote each text that is no plain word: kubectl reads N as false and 1e3 as a number."""
    plain = _WORD.fullmatch(text) and text.lower() not in _NO_WORDS
    style = None if plain or "\n" in text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
