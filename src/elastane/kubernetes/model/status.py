"""The status of an ElasticJob, which the operator writes for people and as its own memory.

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
    """Base of the parts of a status."""


class Condition(_StatusPart, frozen=True, kw_only=True):
    """One condition, as of Kubernetes' own objects, with the original's two times."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_update_time: _Time = None
    last_transition_time: _Time = None


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Pods by phase; the original's three counts, written also when they are 0."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0


class WorkerStatus(_StatusPart, frozen=True, kw_only=True):
    """One pod, for a person: of at most WORKERS_TOLD_MAX pods, those in trouble first."""

    index: int
    pod: str = ""
    node: str = ""
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    rank: int | None = None


class EarlyEnd(_StatusPart, frozen=True, kw_only=True):
    """An index whose pod ended early: how often in a row, and when the next may be made.

    `waiting`: its replacement does not run yet.
    """

    index: int
    quick: int = 0
    waiting: bool = False
    not_before: _Time = None
    node: str = ""
    why: str = ""


class NodeFailures(_StatusPart, frozen=True, kw_only=True):
    """A node on which pods of the job failed. `unfit`: an agent said so itself (exit code 69)."""

    name: str
    failures: int = 0
    unfit: bool = False


class InPlace(_StatusPart, frozen=True, kw_only=True):
    """Restarts of a pod's containers by its kubelet, as far as they are counted."""

    uid: str
    restarts: int = 0


class Crashes(_StatusPart, frozen=True, kw_only=True):
    """Failures in a row without a step above `step`, the highest; `time`: of the last failure."""

    count: int = 0
    step: int = 0
    time: _Time = None


class IncidentStatus(_StatusPart, frozen=True, kw_only=True):
    """The last incident or failure, and its cause."""

    cause: str
    time: _Time = None


class JobStatus(_StatusPart, frozen=True, kw_only=True):
    """The whole status. Counters never go back while the job lives.

    `restarts` counts replaced pods, restarted containers, and restarts of workers by their agents;
    `worker_restarts` counts only the last of these. `failures` counts pods and containers towards
    backoffLimit, `disruptions` the pods that the cluster took away. `last_failure` is that of a pod
    or container, `last_incident` one that the job's coordinator reported.

    `replicas` counts living pods, for the scale subresource; `outdated` those of an older template.
    `counted`: uids of pods whose end was counted, which happens before they are deleted. `fenced`:
    uids of pods on lost nodes, which may neither rejoin nor publish.

    `first_start_time`: when a pod of the job was first seen to have run. `stuck_since_time`: since
    when no pod can start, for a reason that does not end by itself. `ended_well_time`: when the
    first pod succeeded; no pod is created after that.
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
    """Return the status as it was written; of an unreadable one, the parts that can be read.

    Another version of the operator, or a person, may have written it. One wrong field must neither
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
    """Return the status as the API server takes it."""
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
