"""The actions of a decision, which the shell carries out.

Each is idempotent by its object: a creation by name, a deletion by uid. All actions of one decision
may be repeated, or cut off anywhere, and the next decision makes up for it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from elastane.kubernetes.model.status import JobStatus


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the actions."""


class CreatePod(_Action, frozen=True, kw_only=True):
    """Create pod `name`, of replica `index`. The manifest carries the owner reference."""

    name: str
    index: int
    manifest: dict[str, Any]


class DeletePod(_Action, frozen=True, kw_only=True):
    """Delete a pod, if it is still the one with this uid.

    `grace_s` None leaves the pod's own terminationGracePeriodSeconds; 0 is by force: only for a
    pod that is fenced already. `why` is for logs.
    """

    name: str
    uid: str
    grace_s: int | None
    why: str


class CreateObject(_Action, frozen=True, kw_only=True):
    """Create a Service, ServiceAccount, RoleBinding or ConfigMap."""

    kind: str
    name: str
    manifest: dict[str, Any]


class CreateToken(_Action, frozen=True, kw_only=True):
    """Create the Secret `name` with a random token of the job, unless there is one of that name.

    The shell draws the token. It is a separate action because the operator may create Secrets but
    not read them: an existing Secret is an answer here, not a conflict.
    """

    name: str
    manifest: dict[str, Any]


class PatchObject(_Action, frozen=True, kw_only=True):
    """Merge-patch an object, also a Pod (adoption); the patch holds metadata.uid as precondition.

    A 404 or 409 is no error: the object has changed, and the next decision reads it again.
    """

    kind: str
    name: str
    patch: dict[str, Any]


class DeleteObject(_Action, frozen=True, kw_only=True):
    """Delete an object, if it is still the one with this uid."""

    kind: str
    name: str
    uid: str


class ReleaseLease(_Action, frozen=True, kw_only=True):
    """Give the Lease of the job's coordinator back, if it is held in one of these pods.

    `pods` are those that are known to be dead: names by uid. If this action is not done, the Lease
    expires by itself.
    """

    lease: str
    pods: dict[str, str]


class DeleteJob(_Action, frozen=True, kw_only=True):
    """Delete the ElasticJob itself, in the background, if it is still the one with this uid."""

    uid: str


Action = (
    CreatePod
    | DeletePod
    | CreateObject
    | CreateToken
    | PatchObject
    | DeleteObject
    | ReleaseLease
    | DeleteJob
)


class ReportedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An Event on the ElasticJob; published once for each (reason, message), and counted.

    `count`: how often it has happened so far, for a lasting condition; a decision that finds the
    condition unchanged gives the same number. None: it happened just now, once more.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    count: int | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one job: its next status, and the actions of the shell.

    The shell's obligations. With `status_first`, the status is written before any action, and no
    action is done unless that write has succeeded. (It is a merge patch with the resourceVersion
    of the job that was observed: a decision about an older job is refused, and made again.)
    Without it, the status is written after the actions. The status is written only where it
    differs (`status.merge_patch`). ReleaseLease comes first. All actions on objects (CreateObject,
    CreateToken, PatchObject, DeleteObject) are done, in their order, before the first on a pod;
    those on pods may run side by side. The shell does not repeat an action that was refused: see
    Refusal. `again_in_s`: decide again after so long, without any event; None: no need.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    status_first: bool = True
    events: tuple[ReportedEvent, ...] = ()
    again_in_s: float | None = None
