"""The actions of a decision, which the shell carries out.

Each action can be repeated without effect: a creation is bound to a name, a deletion to a uid. The
actions of one decision may end anywhere, and the next decision makes up for the rest.
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

    `grace_s` None leaves the pod's own terminationGracePeriodSeconds. 0 deletes by force, which is
    right only for a fenced pod. `why` is for logs.
    """

    name: str
    uid: str
    grace_s: int | None
    why: str


class CreateObject(_Action, frozen=True, kw_only=True):
    """Create a Service, ServiceAccount, RoleBinding, ConfigMap or pod group.

    The kind of a pod group is `names.pod_group_kind` of its apiVersion.
    """

    kind: str
    name: str
    manifest: dict[str, Any]


class CreateToken(_Action, frozen=True, kw_only=True):
    """Create the Secret `name` with a random token of the job, unless there is one of that name.

    The shell draws the token. The action is a separate one because the operator may create Secrets
    but not read them: an existing Secret is a success here, not a conflict.
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
    """Release the Lease of the job's coordinator, if a process in one of these pods holds it.

    `pods` has the pods that are known to be dead: names by uid. Without this action the Lease
    expires later by itself.
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

    `count`: how often a lasting condition has occurred so far; a decision that finds the condition
    unchanged gives the same number. None: the event occurred once more just now.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    count: int | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one job: its next status, and the actions of the shell.

    The shell's obligations:

    - With `status_first`, the status is written before any action, and no action is done unless
      that write has succeeded. Otherwise it is written after the actions. It is written only if it
      differs (`status.merge_patch`). None: nothing is written, since another controller does.
    - The write is a merge patch with the resourceVersion of the observed job. So a decision about
      an older version of the job is refused, and made again.
    - Actions on objects (CreateObject, CreateToken, PatchObject, DeleteObject) are done first, in
      their order, then ReleaseLease, then the actions on pods. The last may run at the same time.
    - The shell does not repeat an action that was refused: see Refusal.
    - It asks for another decision after `again_in_s`, if no event comes before; None: never.
    """

    status: JobStatus | None
    actions: tuple[Action, ...] = ()
    status_first: bool = True
    events: tuple[ReportedEvent, ...] = ()
    again_in_s: float | None = None
