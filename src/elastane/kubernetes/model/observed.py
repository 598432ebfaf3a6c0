"""The objects that a decision rests on, each with the fields that a decision reads.

Other fields are skipped while decoding; at 20,000 pods they would be most of the memory.
Times are kept as the strings that the server sent, since an unreadable one must not make an object
unreadable; `since_epoch` and `as_time` translate. Nothing here decides.

Among them are the two messages between the operator and the coordinator of a job, each in a
ConfigMap: the directive, which `reconcile` writes, and the report, which `kubernetes.bridge`
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec


class Owner(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One of an object's owner references."""

    uid: str = ""
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An object's metadata. `edition`, its "generation", grows with each change of the spec."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    edition: int = msgspec.field(default=0, name="generation")
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[Owner, ...] = ()

    @property
    def controller(self) -> str:
        """The uid of the object that controls this one, or the empty string."""
        return next((owner.uid for owner in self.owner_references if owner.controller), "")

    @property
    def is_leaving(self) -> bool:
        """Whether its deletion was requested."""
        return self.deletion_timestamp is not None


def since_epoch(time: str | None) -> float | None:
    """Return seconds since the epoch of an RFC 3339 time; None for any other text."""
    if not time:
        return None
    try:
        at = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def as_time(seconds: float) -> str:
    """Return the RFC 3339 time of seconds since the epoch, in whole seconds as the server has."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The key of the report in its ConfigMap; the value is JSON.
REPORT_KEY = "report"


def directive_name(job: str) -> str:
    """Return the name of the ConfigMap from the operator to the job's coordinator."""
    return f"{job}-directive"


def report_name(job: str) -> str:
    """Return the name of the ConfigMap from the job's coordinator to the operator."""
    return f"{job}-report"


def dead_in(data: dict[str, str]) -> list[str]:
    """Return the uids of dead pods in the data of a directive's ConfigMap."""
    return data.get("dead", "").split()


class Directive(msgspec.Struct, frozen=True):
    """The operator's orders: the range of nodes, and the fenced and dead pods.

    `nodes` is None if the range is absent or unreadable. `fenced` has the uids of pods that may
    still run, `dead` those of pods whose end a kubelet reported.
    """

    nodes: tuple[int, int] | None = None
    fenced: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


class MemberReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pod: `joined`, `away` for a moment, `departed` or `fenced`."""

    pod: str = ""
    state: str = ""
    rank: int = -1


class JobReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The coordinator's report. Times are seconds since the epoch, by its host's clock."""

    at_s: float = 0.0
    phase: str = ""
    reason: str = ""
    round: int = 0
    attempt: int = 0
    world_size: int = 0
    nodes: int = 0
    step: int = 0
    steps_per_s: float = 0.0
    incident: str = ""
    incident_at_s: float = 0.0
    restarts: int = 0
    members: tuple[MemberReport, ...] = ()


class _Read(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the types that are decoded from the API server."""


class ContainerWaiting(_Read, frozen=True, kw_only=True):
    """A container that does not run yet, and why."""

    reason: str = ""
    message: str = ""


class Running(_Read, frozen=True, kw_only=True):
    """A container that runs."""

    started_at: str | None = None


class ContainerEnd(_Read, frozen=True, kw_only=True):
    """A container that has ended."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class ContainerState(_Read, frozen=True, kw_only=True):
    """One of the three fields is set; none is set if nothing is known."""

    waiting: ContainerWaiting | None = None
    running: Running | None = None
    terminated: ContainerEnd | None = None


class ContainerStatus(_Read, frozen=True, kw_only=True):
    """The state of one container, as its kubelet reports it."""

    name: str = ""
    image: str = ""
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodCondition(_Read, frozen=True, kw_only=True):
    """One of a pod's conditions: PodScheduled, Ready, DisruptionTarget."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodSpec(_Read, frozen=True, kw_only=True):
    """The part of a pod's spec that is read: its node."""

    node_name: str = ""


class PodStatus(_Read, frozen=True, kw_only=True):
    """The status of a pod, as the kubelet and the control plane report it."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(_Read, frozen=True, kw_only=True):
    """A pod."""

    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class SeenService(_Read, frozen=True, kw_only=True):
    """A Service, of which only the existence is read."""

    metadata: Meta = Meta()


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has pods of the job.

    `unreachable_since_s`: since when, in seconds since the epoch, the node's Ready condition has
    been Unknown, by its lastTransitionTime; None if it is not Unknown. `exists` is False for a node
    that was deleted.
    """

    name: str
    exists: bool = True
    unreachable_since_s: float | None = None


class OwnedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Another object of the job: ServiceAccount, RoleBinding, ConfigMap, pod group.

    `data` is that of a ConfigMap. The operator finds the objects by the job's labels.
    """

    kind: str
    metadata: Meta
    data: dict[str, str] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's answer to a write that it refused.

    For a creation, 400, 403, 404, 409 and 422 are refusals. The shell keeps the newest one of each
    name. It forgets them when the job's `metadata.edition` changes, when the object appears, and
    when the shell itself ends. `times` counts refusals in a row, `at_s` is the time of the last.

    A 409 is a refusal only if the object with that name does not belong to the job; otherwise the
    shell takes the object into its cache. For a patch or a deletion, 403 and 422 are refusals until
    the action succeeds. The shell retries after any other answer (429, 5xx, none), and after the
    403 of a namespace that is being deleted.
    """

    kind: str
    name: str
    code: int
    message: str
    times: int = 1
    at_s: float = 0.0
    verb: Literal["create", "patch", "delete"] = "create"


class ElasticJob(_Read, frozen=True, kw_only=True):
    """The resource as received: metadata decoded, spec and status complete and unchanged."""

    metadata: Meta = Meta()
    spec: Any = {}
    status: Any = {}


class JobTemplate(_Read, frozen=True, kw_only=True):
    """An ElasticJobTemplate as received: metadata decoded, spec complete and unchanged."""

    metadata: Meta = Meta()
    spec: Any = {}


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one job, as last seen.

    `pods`: all pods with the job's labels and name, also while they are being deleted, and also if
    another object controls them. `gone`: deleted pods, each in its last state. `services` and
    `objects`: like `pods`. `nodes`: the nodes of these pods; a node that is missing here counts as
    healthy. `refused`: see Refusal. `unserved`: kinds of objects that cannot be read, and why:
    their API is not installed, or the operator has no right to it. `template`: the job template
    that the spec has to be made of; it is read only for such a job, and None if there is none.
    """

    job: ElasticJob
    pods: tuple[Pod, ...] = ()
    gone: tuple[Pod, ...] = ()
    services: tuple[SeenService, ...] = ()
    objects: tuple[OwnedObjects, ...] = ()
    nodes: Mapping[str, SeenNode] = {}
    report: JobReport | None = None
    refused: tuple[Refusal, ...] = ()
    unserved: Mapping[str, str] = {}
    template: JobTemplate | None = None
