"""The status of an ElasticJob, which users read and from which the operator continues.

The status is the operator's only memory. Each counted event is kept here under the uid of its
object, so that an operator that was killed at any point counts it once. Lists are bounded, since
one object holds at most 1.5 MB.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_Time = Annotated[
    str | None, msgspec.Meta(extra_json_schema={"type": "string", "format": "date-time"})
]


class _StatusPart(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base class of the parts of a status. Fields at their defaults are not written."""


class Condition(_StatusPart, frozen=True, kw_only=True):
    """One condition, with the fields of Kubernetes and the two times of the original controller."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_update_time: _Time = None
    last_transition_time: _Time = None


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Pods by phase: the three counts of the original controller, written also when they are 0."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0


class WorkerStatus(_StatusPart, frozen=True, kw_only=True):
    """One pod. The list is bounded; if it cannot hold all pods, it holds the failing ones first."""

    index: int
    pod: str = ""
    node: str = ""
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    rank: int | None = None


class EarlyEnd(_StatusPart, frozen=True, kw_only=True):
    """An index whose pod ended early: its early ends in a row, and the time of the next attempt.

    `waiting`: the replacement pod does not run yet.
    """

    index: int
    quick: int = 0
    waiting: bool = False
    not_before: _Time = None
    node: str = ""
    why: str = ""


class NodeFailures(_StatusPart, frozen=True, kw_only=True):
    """A node on which pods of the job failed. `unfit`: an agent there exited with code 69."""

    name: str
    failures: int = 0
    unfit: bool = False


class InPlace(_StatusPart, frozen=True, kw_only=True):
    """The restarts of a pod's containers by its kubelet that the operator has counted."""

    uid: str
    restarts: int = 0


class Crashes(_StatusPart, frozen=True, kw_only=True):
    """Failures in a row since the job last passed `step`, its highest. `time`: the last failure."""

    count: int = 0
    step: int = 0
    time: _Time = None


class IncidentStatus(_StatusPart, frozen=True, kw_only=True):
    """The cause and the time of an incident or a failure."""

    cause: str
    time: _Time = None


class JobStatus(_StatusPart, frozen=True, kw_only=True):
    """The status of the job. Its counters never decrease.

    `restarts` counts replaced pods, restarted containers, and restarts of workers by their agents;
    `worker_restarts` counts only the last of these. `failures` counts the failed pods and
    containers that backoffLimit bounds, `disruptions` the pods that the cluster removed.
    `last_failure` is of a pod or container. `last_incident` was reported by the coordinator.

    `replicas` counts living pods, for the scale subresource. `outdated` counts pods of an older
    template. `job_template`: the ElasticJobTemplate that the spec was made of, and its edition.
    `counted`: uids of ended pods, which are counted before they are deleted. `fenced`:
    uids of pods on lost nodes, which may neither rejoin nor publish.

    `first_start_time`: the time at which a pod of the job had run. `stuck_since_time`: the time
    since which no pod can start without a change by the user. `ended_well_time`: the time at which
    the first pod succeeded. No pod is created after that.
    """

    phase: str = ""
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    replica_statuses: dict[str, ReplicaStatus] = {}
    replicas: int = 0
    ready_replicas: int = 0
    desired_replicas: int = 0
    outdated: int = 0
    selector: str = ""
    job_template: str = ""
    start_time: _Time = None
    completion_time: _Time = None
    ended_well_time: _Time = None
    first_start_time: _Time = None
    stuck_since_time: _Time = None
    restarts: int = 0
    worker_restarts: int = 0
    failures: int = 0
    disruptions: int = 0
    round: int | None = None
    world_size: int | None = None
    step: int | None = None
    steps_per_second: float | None = None
    last_progress_time: _Time = None
    crashes: Crashes | None = None
    last_incident: IncidentStatus | None = None
    last_failure: IncidentStatus | None = None
    workers: tuple[WorkerStatus, ...] = ()
    workers_omitted: int = 0
    counted: tuple[str, ...] = ()
    fenced: tuple[str, ...] = ()
    in_place: tuple[InPlace, ...] = ()
    early_ends: tuple[EarlyEnd, ...] = msgspec.field(default=(), name="troubles")
    nodes: tuple[NodeFailures, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of type `kind`, if there is one."""
        return next((one for one in self.conditions if one.type == kind), None)

    def is_(self, kind: str) -> bool:
        """Return whether the condition of type `kind` is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"


def read_status(raw: Any) -> JobStatus:
    """Return a status from its JSON object; if fields are invalid, with their defaults instead.

    Another version of the operator, or a user, may have written it. One invalid field must neither
    stop the job nor lose the other counters.
    """
    if not isinstance(raw, dict):
        return JobStatus()
    try:
        return msgspec.convert(raw, JobStatus)
    except msgspec.ValidationError:
        return JobStatus(**_readable(raw))


def _readable(raw: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(JobStatus):
        try:
            found[field.name] = msgspec.convert(raw[field.encode_name], field.type)
        except (KeyError, msgspec.ValidationError):
            continue
    return found


def as_wire(status: JobStatus) -> dict[str, Any]:
    """Return the status as the JSON object that the API server accepts."""
    # JSON turns tuples into lists, so that the result equals a status that was read.
    return _ZEROS | dict(msgspec.json.decode(msgspec.json.encode(status)))


# Written also when they are 0: for kubectl's columns, and for autoscalers.
_ZEROS = dict.fromkeys(("replicas", "readyReplicas", "restarts", "failures", "disruptions"), 0)


def merge_patch(before: Any, after: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON merge patch (RFC 7396) that turns `before` into `after`; None if equal.

    Lists are replaced whole; fields that only `before` has are removed.
    """
    if not isinstance(before, dict):
        return after or None
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key in before and before[key] == value:
            continue
        both = isinstance(value, dict) and isinstance(before.get(key), dict)
        patch[key] = merge_patch(before[key], value) if both else value
    return patch or None
