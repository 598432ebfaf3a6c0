"""The spec of an ElasticJob as types, from which its schema and its validation are made.

The fields of the original TorchElastic controller come first; ours are all optional. Bounds are
part of the types, so that schema and operator cannot differ. Rules between fields are in
`reconcile.settings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elastane.kubernetes.model.names import MANAGER

# Pods of one job. If all of them fail, its status has 0.8 MB, and an object may have 1.5 MB. The
# largest published training jobs have about 3,000 nodes.
REPLICAS_MAX = 4096
INT32_MAX = (1 << 31) - 1

CleanPodPolicy = Literal["All", "Running", "None"]
RestartPolicy = Literal["ExitCode", "OnFailure", "Never", "Always"]
RuleAction = Literal["Retry", "Fail", "Ignore"]
Launcher = Literal["elastane", "torchrun"]
Backend = Literal["c10d", "elastane", "etcd", "etcd-v2", "file", "kubernetes", "redis"]
ScaleDownPolicy = Literal["HighestIndex", "PendingFirst"]
UpdateStrategy = Literal["OnDelete", "RollingUpdate"]
PodGroupKind = Literal["Coscheduling", "Kubernetes", "Volcano"]
# The fields of a job template that a job may set, unless the template allows fewer.
Overridable = Literal["args", "env", "image", "maxReplicas", "minReplicas", "replicas"]

Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
# int32, as Kubernetes' own fields of these names.
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Codes = Annotated[tuple[int | str, ...], Meta(min_length=1, max_length=64)]


def _meaning(text: str) -> Meta:
    return Meta(description=text)


class SchedulingPolicy(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True
):
    """Gang scheduling: the pods of the job's minimum are scheduled together, or none of them."""

    pod_group: Annotated[
        PodGroupKind | None,
        _meaning(
            "The pod group that the operator creates. Coscheduling: of the scheduler plugin of that"
            " name. Kubernetes: of the API server's own API. Volcano: of Volcano. Not set: none."
        ),
    ] = None
    min_available: Annotated[
        Count | None,
        _meaning(
            "Pods that must be scheduled together, or replicas where that is less. Not set:"
            " minReplicas."
        ),
    ] = None
    queue: Annotated[
        Annotated[str, Meta(min_length=1, max_length=253)] | None,
        _meaning("Volcano's queue. Not set: its default one."),
    ] = None
    schedule_timeout_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=INT32_MAX)] | None,
        _meaning("Coscheduling's wait for the pods of a group. Not set: the plugin's own."),
    ] = None


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Limits and policies of the run. The same fields are valid directly in spec."""

    clean_pod_policy: Annotated[
        CleanPodPolicy | None,
        _meaning(
            "What becomes of pods when the job has ended. All: all are deleted. Running: those"
            " that still run. None: no pod is touched. Not set: as Running."
        ),
    ] = None
    ttl_seconds_after_finished: Annotated[
        Count | None, _meaning("The job is deleted so long after its end. Not set: never.")
    ] = None
    active_deadline_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=INT32_MAX)] | None,
        _meaning(
            "The job fails when it has been active for so long; a suspended job is not active."
        ),
    ] = None
    backoff_limit: Annotated[
        Count | None,
        _meaning("Failures that are borne; one more fails the job. Not set: any number."),
    ] = None
    scheduling_policy: SchedulingPolicy | None = None
    suspend: Annotated[
        bool | None, _meaning("True: pods are drained and none is made, until it is false again.")
    ] = None


class ExitCodeRule(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The action for pods that end with one of these codes. The first matching rule applies."""

    codes: Annotated[Codes, _meaning('Exit codes 1 to 255, or ranges such as "64-78".')]
    action: Annotated[
        RuleAction,
        _meaning(
            "Retry: a new pod, counted towards backoffLimit. Ignore: a new pod, not counted."
            " Fail: the job fails."
        ),
    ]


class NodeQuarantine(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The number of failures after which the operator avoids a node for new pods of the job."""

    failures: Annotated[
        Annotated[int, Meta(ge=1, le=1000)], _meaning("Failures of the job's pods on one node.")
    ] = 3


class WorkersSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The worker pods: their number, their restart policy and their template."""

    replicas: Annotated[
        Count,
        _meaning("Pods that are wanted; held between minReplicas and maxReplicas. kubectl scale."),
    ] = 1
    restart_policy: Annotated[
        RestartPolicy,
        _meaning(
            "ExitCode: a new pod for exit codes 128 to 255, 69 and 75; others fail the job."
            " OnFailure, Always: the container is restarted in its pod. Never: any failure fails"
            " the job. What the cluster takes away is replaced under each of them."
        ),
    ] = "ExitCode"
    template: Annotated[
        dict[str, Any],
        _meaning("The pod. Arguments are injected into its container elasticjob-worker."),
    ]


class ReplicaSpecs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pods of the job."""

    Worker: WorkersSpec


class MadeOf(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Set by the operator once the spec is made of the template, which is not read again."""

    edition: Annotated[int, _meaning("The edition of the template.")]
    of: Annotated[str, _meaning("A digest of the other fields of templateRef.")]


class TemplateRef(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The ElasticJobTemplate of the job's namespace that the other fields of the spec are made of.

    A job sets the fields below instead of those of the spec.
    """

    name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=253)], _meaning("Name of the template.")
    ]
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        _meaning("Instead of the template's. Of the container elasticjob-worker, as the next two."),
    ] = None
    args: Annotated[
        Annotated[tuple[str, ...], Meta(max_length=1024)], _meaning("After the template's.")
    ] = ()
    env: Annotated[
        Annotated[tuple[dict[str, Any], ...], Meta(max_length=1024)],
        _meaning("Variables, instead of the template's of the same names."),
    ] = ()
    replicas: Annotated[Count | None, _meaning("Instead of the template's.")] = None
    min_replicas: Annotated[Replicas | None, _meaning("Instead of the template's.")] = None
    max_replicas: Annotated[Replicas | None, _meaning("Instead of the template's.")] = None
    made: MadeOf | None = None


class ElasticJobSpec(RunPolicy, frozen=True, kw_only=True):
    """The specification of the job."""

    rdzv_endpoint: Annotated[
        Annotated[str, Meta(max_length=1024)] | None,
        _meaning("Rendezvous of the user's, as host:port. Not set: none is needed."),
    ] = None
    rdzv_backend: Annotated[
        Backend | None,
        _meaning(
            "What is at rdzvEndpoint. Not set: etcd, or c10d where it names a pod of the job."
        ),
    ] = None
    min_replicas: Annotated[
        Replicas | None, _meaning("Fewest pods that can train. Not set: replicas.")
    ] = None
    max_replicas: Annotated[
        Replicas | None, _meaning("Most pods that may train. Not set: replicas.")
    ] = None
    replica_specs: ReplicaSpecs
    launcher: Annotated[
        Launcher, _meaning("The image's ENTRYPOINT: elastane run, or a torchrun of PyTorch's own.")
    ] = "elastane"
    spares: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        _meaning("Workers in waiting on each pod, for the place of one that is lost."),
    ] = 0
    scale_down_policy: Annotated[
        ScaleDownPolicy,
        _meaning(
            "Which pods leave first. HighestIndex: those of the highest index."
            " PendingFirst: those that do not run yet, then those."
        ),
    ] = "HighestIndex"
    update_strategy: Annotated[
        UpdateStrategy,
        _meaning(
            "What an edit of the template does to pods that have started. OnDelete: nothing, until"
            " a pod is replaced for another reason. RollingUpdate: they are drained and replaced,"
            " one at a time."
        ),
    ] = "OnDelete"
    exit_code_rules: Annotated[
        Annotated[tuple[ExitCodeRule, ...], Meta(max_length=64)],
        _meaning("Rules that come before restartPolicy ExitCode's own."),
    ] = ()
    node_quarantine: NodeQuarantine | None = None
    managed_by: Annotated[
        Annotated[str, Meta(min_length=1, max_length=63)] | None,
        _meaning(
            "The controller of the job, as domain/name. The operator leaves a job of another one"
            f" alone. Not set: {MANAGER}."
        ),
    ] = None
    stalled_seconds: Annotated[
        Annotated[int, Meta(ge=0, le=7 * 86_400)],
        _meaning(
            "The job is Stalled when enough pods run and its step has not risen for so long."
            " 0: never."
        ),
    ] = 600
    node_lost_seconds: Annotated[
        Annotated[int, Meta(ge=0, le=86_400)],
        _meaning(
            "A pod is replaced when its node has been unreachable for so long; at once when the"
            " job has lost it too, or when the node is deleted."
        ),
    ] = 10
    template_ref: TemplateRef | None = None


class ElasticJobTemplateSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A spec that jobs of the same namespace may name, and what they may set of it."""

    description: Annotated[
        Annotated[str, Meta(max_length=1024)] | None, _meaning("For those who choose a template.")
    ] = None
    overridable: Annotated[
        tuple[Overridable, ...] | None,
        _meaning("The fields that a job may set in its templateRef. Not set: all of them."),
    ] = None
    job: ElasticJobSpec
