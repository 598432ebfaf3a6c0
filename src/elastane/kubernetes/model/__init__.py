"""Types of the ElasticJob, of the observed cluster, and of a decision.

Data only: no I/O, no clock, no decision. `names` holds the names that are a contract, `spec` and
`status` the resource, `observed` the input of a decision, `decision` its output.
"""

from elastane.kubernetes.model.decision import (
    Action,
    CreateObject,
    CreatePod,
    CreateToken,
    Decision,
    DeleteJob,
    DeleteObject,
    DeletePod,
    PatchObject,
    ReleaseLease,
    ReportedEvent,
)
from elastane.kubernetes.model.observed import (
    ElasticJob,
    JobTemplate,
    Meta,
    Observed,
    OwnedObjects,
    Owner,
    Pod,
    Refusal,
    SeenNode,
    SeenService,
    as_time,
    since_epoch,
)
from elastane.kubernetes.model.status import (
    Condition,
    JobStatus,
    as_wire,
    merge_patch,
    read_status,
)

__all__ = [
    "Action",
    "Condition",
    "CreateObject",
    "CreatePod",
    "CreateToken",
    "Decision",
    "DeleteJob",
    "DeleteObject",
    "DeletePod",
    "ElasticJob",
    "JobStatus",
    "JobTemplate",
    "Meta",
    "Observed",
    "OwnedObjects",
    "Owner",
    "PatchObject",
    "Pod",
    "Refusal",
    "ReleaseLease",
    "ReportedEvent",
    "SeenNode",
    "SeenService",
    "as_time",
    "as_wire",
    "merge_patch",
    "read_status",
    "since_epoch",
]
