"""The objects behind a decision: of each only the fields that count.

Fields without a name here are skipped while decoding; at 20,000 pods that is most of the memory.
Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from elastane.kubernetes.bridge.messages import JobReport
from elastane.kubernetes.model.meta import Meta


class _Read(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of what is decoded from the API server."""


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
    """One of the three, or none: nothing is known."""

    waiting: ContainerWaiting | None = None
    running: Running | None = None
    terminated: ContainerEnd | None = None


class ContainerStatus(_Read, frozen=True, kw_only=True):
    """What the kubelet says of one container."""

    name: str = ""
    image: str = ""
    ready: bool = False
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
    """Of a pod's spec: where it is bound, and whether the kubelet restarts its containers."""

    node_name: str = ""
    restart_policy: str = ""


class PodStatus(_Read, frozen=True, kw_only=True):
    """What the kubelet and the control plane say of a pod."""

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
    """A Service; that it is there is all that counts."""

    metadata: Meta = Meta()


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that pods of the job are on, as the shell sums it up.

    `ready` is that the node's Ready condition is True. `unreachable_since_s`: since when, in
    seconds since the epoch, the condition has been Unknown, by its lastTransitionTime; None
    where it is not. A node that does not exist has `exists` False. `cordoned`:
    spec.unschedulable.
    """

    name: str
    exists: bool = True
    ready: bool = True
    unreachable_since_s: float | None = None
    cordoned: bool = False


class OwnedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Another object that belongs to the job: ServiceAccount, Role, RoleBinding, ConfigMap.

    `data` is that of a ConfigMap. To be found, they carry the job's labels.
    """

    kind: str
    metadata: Meta
    data: dict[str, str] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's answer to a deed that it refused.

    To a creation: 400, 403, 404, 409, 422. The shell keeps the newest one of each name, and
    forgets it when the job's `metadata.edition` changes, when the object appears, and when the
    shell itself ends. `times` counts in a row, `at_s` is when the last one came. Of 409 it is
    kept only where the object that has the name is not the job's (the shell looks, and takes what
    is the job's into its cache). Other answers (429, 5xx, none) are the shell's to try again; so
    is 403 of a namespace that is being deleted. To a patch or a deletion: 403 and 422, until that
    is done.
    """

    kind: str
    name: str
    code: int
    message: str
    times: int = 1
    at_s: float = 0.0
    deed: Literal["create", "patch", "delete"] = "create"


class ElasticJob(_Read, frozen=True, kw_only=True):
    """The resource as it came: metadata read, spec and status as they are, nothing lost."""

    metadata: Meta = Meta()
    spec: Any = {}
    status: Any = {}


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All of one job, as last seen.

    `pods`: those with the job's labels and name, also those that are being deleted, and those
    that another object controls. `gone`: pods that were deleted, each as the watch showed it last.
    `services` and `objects`: like `pods`. `nodes`: of the nodes that the pods are on; one that is
    missing here is taken for a healthy one. `refused`: see Refusal.
    """

    job: ElasticJob
    pods: tuple[Pod, ...] = ()
    gone: tuple[Pod, ...] = ()
    services: tuple[SeenService, ...] = ()
    objects: tuple[OwnedObjects, ...] = ()
    nodes: Mapping[str, SeenNode] = {}
    report: JobReport | None = None
    refused: tuple[Refusal, ...] = ()
