"""Refusals of the API server: which of them end the job, and when the others are retried.

400 and 422 mean that the manifest is no valid pod and never will be, so the job does not start (see
`refused_template`). Any other refusal may pass: a quota, a missing account, a name that is taken, a
right to patch or to delete that the operator lacks.
"""

from __future__ import annotations

from elastane.kubernetes.model import (
    Action,
    DeleteJob,
    DeleteObject,
    DeletePod,
    PatchObject,
    Refusal,
)
from elastane.kubernetes.model.names import KIND
from elastane.kubernetes.reconcile.bounds import REFUSED_FIRST_S, REFUSED_MAX_S, TEXT_CHARS_MAX
from elastane.kubernetes.reconcile.context import DecisionContext

_NEVER = (400, 422)


def refused_template(context: DecisionContext) -> Refusal | None:
    """Return a final refusal of the pod template, if there is one."""
    for refusal in context.seen.refused:
        if (refusal.deed, refusal.kind) == ("create", "Pod") and refusal.code in _NEVER:
            return refusal
    return None


def waits_for_refusal(context: DecisionContext, kind: str, name: str) -> bool:
    """Whether a creation that was refused is not yet to be tried again; says so."""
    refusal = context.refusal(kind, name)
    if refusal is None:
        return False
    reason = _reason(refusal)
    context.wants.append((reason, f"{kind} {name} was refused: {told(refusal)}"))
    context.tell("Warning", f"FailedCreate{kind}", f"{name}: {told(refusal)}", refusal.times)
    return _is_too_soon(context, refusal)


def hold_refused(context: DecisionContext) -> None:
    """Say which patches and deletions were refused, and leave out those that are not due again."""
    refused: dict[tuple[str, str, str], Refusal] = {}
    for one in context.seen.refused:
        refused[one.deed, one.kind, one.name] = one
    kept: list[Action] = []
    for action in context.actions:
        refusal = refused.get(_deed(context, action))
        if refusal is None:
            kept.append(action)
            continue
        text = f"to {refusal.deed} {refusal.kind} {refusal.name} was refused: {told(refusal)}"
        context.wants.append((_reason(refusal), text))
        context.tell("Warning", _reason(refusal), text, refusal.times)
        if not _is_too_soon(context, refusal):
            kept.append(action)
    context.actions = kept


def _deed(context: DecisionContext, action: Action) -> tuple[str, str, str]:
    if isinstance(action, PatchObject):
        return "patch", action.kind, action.name
    if isinstance(action, DeletePod):
        return "delete", "Pod", action.name
    if isinstance(action, DeleteObject):
        return "delete", action.kind, action.name
    if isinstance(action, DeleteJob):
        return "delete", KIND, context.job.name
    return "", "", ""


def _is_too_soon(context: DecisionContext, refusal: Refusal) -> bool:
    pause_s = min(REFUSED_MAX_S, REFUSED_FIRST_S * 2.0 ** min(max(refusal.times, 1) - 1, 16))
    context.wake(refusal.at_s + pause_s)
    return refusal.at_s + pause_s > context.now_s


def told(refusal: Refusal) -> str:
    """Return a refusal as a condition repeats it."""
    text = " ".join(refusal.message.split())
    return text[:TEXT_CHARS_MAX] or f"HTTP {refusal.code}"


def _reason(refusal: Refusal) -> str:
    if refusal.code == 409:
        return "NameTaken"
    if refusal.code == 403:
        return "QuotaExceeded" if "quota" in refusal.message.lower() else "Forbidden"
    return "Refused"
