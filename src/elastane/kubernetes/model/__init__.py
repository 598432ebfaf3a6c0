"""Types of the ElasticJob, of what is seen of a cluster, and of what is decided.

Data only: no I/O, no clock, no decision. `names` holds the names that are a contract, `spec` and
`status` the resource, `seen` what a decision rests upon, `deeds` what it asks for.
"""

from elastane.kubernetes.model.actions import (
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
from elastane.kubernetes.model.meta import Meta, Owner, as_time, since_epoch
from elastane.kubernetes.model.seen import (
    ElasticJob,
    Observed,
    OwnedObjects,
    Pod,
    Refusal,
    SeenNode,
    SeenService,
)
from elastane.kubernetes.model.spec import ElasticJobSpec
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
    "ElasticJobSpec",
    "JobStatus",
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
