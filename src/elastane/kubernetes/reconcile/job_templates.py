"""Makes the spec of a job that names a job template, and tells what keeps it from being made.

The operator makes the spec once, when it first sees the job, and writes it into the job together
with the template's edition. From then on the job is as if its user had written all of it:
nothing reads the template again, so an edit or the deletion of one changes no job. Only an edit of
`spec.templateRef` itself, which its digest shows, makes the spec again from the present template.

A job may set six fields of its template, in `templateRef`; the template may allow fewer. Arguments
follow those of the template, and variables replace those of the same name. Pure.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from typing import Any, get_args

import msgspec

from elastane.kubernetes.model import (
    Decision,
    ElasticJob,
    JobStatus,
    Observed,
    PatchObject,
    Refusal,
    ReportedEvent,
    merge_patch,
    since_epoch,
)
from elastane.kubernetes.model.names import CONTAINER, KIND, TEMPLATE_KIND, is_subdomain
from elastane.kubernetes.model.spec import ElasticJobSpec, Overridable
from elastane.kubernetes.reconcile.bounds import TEMPLATE_LOOK_MAX_S, TEMPLATE_LOOK_MIN_S
from elastane.kubernetes.reconcile.context import refusal_text
from elastane.kubernetes.reconcile.ending import has_ended, is_corrigible, refuse, start_again
from elastane.kubernetes.reconcile.settings import Wrong, merged_policy, read, shown

_REF = "spec.templateRef"
# The job's own, whatever it is made of: Kueue sets the first, and controllers go by the second.
_OWN = ("suspend", "managedBy", "templateRef")
_DEFAULTS = {
    field.encode_name: msgspec.to_builtins(field.default)
    for field in msgspec.structs.fields(ElasticJobSpec)
    if not field.required
}


def template_to_read(job: ElasticJob) -> str | None:
    """Return the name of the job template that the job has to be made of; None for none.

    The name is empty where no template can have the one that was given.
    """
    ref = _ref_of(job)
    if ref is None or _is_made(ref):
        return None
    name = ref.get("name")
    return name if isinstance(name, str) and is_subdomain(name) else ""


def _ref_of(job: ElasticJob) -> dict[str, Any] | None:
    ref = job.spec.get("templateRef") if isinstance(job.spec, dict) else None
    return ref if isinstance(ref, dict) else None


def _is_made(ref: dict[str, Any]) -> bool:
    made = ref.get("made")
    return isinstance(made, dict) and made.get("of") == _digest(ref)


def _digest(ref: dict[str, Any]) -> str:
    asked = {key: value for key, value in ref.items() if key != "made" and value is not None}
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()[:16]


def make_of_template(seen: Observed, before: JobStatus, now_s: float) -> Decision:
    """Return the decision that writes the job's spec, or that says why it cannot be made."""
    if has_ended(before) and not is_corrigible(before):
        return Decision(status=before)
    spec, wrong = _spec_of(seen)
    meta = seen.job.metadata
    # A template that is missing or wrong may be applied after the job.
    age_s = now_s - (since_epoch(meta.creation_timestamp) or now_s)
    again_in_s = min(TEMPLATE_LOOK_MAX_S, max(TEMPLATE_LOOK_MIN_S, age_s / 10))
    refusal = None if wrong else _refusal_of(seen)
    if refusal is not None and now_s < refusal.at_s + again_in_s:
        wrong.append(_refused(seen, refusal))
        again_in_s = refusal.at_s + again_in_s - now_s
    if wrong:
        decision = _refuse(seen, before, tuple(wrong), now_s)
        return msgspec.structs.replace(decision, again_in_s=again_in_s)
    patch = {
        # Of another version of the job, the fields that are its own may be others.
        "metadata": {"uid": meta.uid, "resourceVersion": meta.resource_version},
        "spec": merge_patch(seen.job.spec, spec),
    }
    ref = spec["templateRef"]
    text = f"made of {TEMPLATE_KIND} {ref['name']}, edition {ref['made']['edition']}"
    return Decision(
        status=None,
        actions=(PatchObject(kind=KIND, name=meta.name, patch=patch),),
        events=(ReportedEvent(type="Normal", reason="MadeOfTemplate", message=text),),
    )


def _refusal_of(seen: Observed) -> Refusal | None:
    """Return the API server's refusal of the spec that was made last, if it refused that."""
    what = ("patch", KIND, seen.job.metadata.name)
    found = (no for no in seen.refused if (no.verb, no.kind, no.name) == what)
    return next(found, None)


def _refused(seen: Observed, refusal: Refusal) -> Wrong:
    name = (_ref_of(seen.job) or {}).get("name")
    what = f"an {TEMPLATE_KIND} of which the API server accepts a job; it answered:"
    return _wrong(f"{_REF}.name", name, f"{what} {refusal_text(refusal)}")


def _refuse(seen: Observed, before: JobStatus, wrong: tuple[Wrong, ...], now_s: float) -> Decision:
    """Report the faults, also where others were reported before: the template may have changed."""
    again = start_again(before) if is_corrigible(before) else before
    decision = refuse(seen, again, wrong, now_s)
    was, now = before.condition("Failed"), (decision.status or before).condition("Failed")
    if was is not None and now is not None and was.message == now.message:
        is_told = before.observed_generation == seen.job.metadata.edition
        return Decision(status=before) if is_told else decision
    return decision


def _spec_of(seen: Observed) -> tuple[dict[str, Any], list[Wrong]]:
    """Return the whole spec of the job, or what is wrong."""
    job, template = seen.job, seen.template
    ref = _ref_of(job) or {}
    name = ref.get("name")
    if template is None:
        what = f"the name of an {TEMPLATE_KIND} in namespace {job.metadata.namespace}"
        return {}, [_wrong(f"{_REF}.name", name, what)]
    if not isinstance(template.spec, dict) or not isinstance(template.spec.get("job"), dict):
        return {}, [_wrong(f"{_REF}.name", name, f"an {TEMPLATE_KIND} with spec.job")]
    wrong = [*_not_allowed(ref, template.spec), *_beside(job, ref)]
    if wrong:
        return {}, wrong
    made = copy.deepcopy(template.spec["job"])
    own = {key: job.spec[key] for key in _OWN if job.spec.get(key) is not None}
    edition = template.metadata.edition
    pin = {"edition": edition, "of": _digest(ref)}
    made = {key: value for key, value in made.items() if key not in _OWN} | own
    made["templateRef"] = ref | {"made": pin}
    with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
        _override(made, ref)  # a wrong type is found below
    where = f"{TEMPLATE_KIND} {name}, edition {edition}: "
    reading = read(ElasticJob(metadata=job.metadata, spec=made))
    return made, [msgspec.structs.replace(one, path=where + one.path) for one in reading.wrong]


def _not_allowed(ref: dict[str, Any], template: dict[str, Any]) -> list[Wrong]:
    """Return the overrides that the template does not allow."""
    known = get_args(Overridable)
    allowed = template.get("overridable")
    allowed = known if allowed is None else tuple(key for key in known if key in allowed)
    what = f"nothing: {TEMPLATE_KIND} {ref.get('name')} lets a job set {_listed(allowed)}"
    return [
        _wrong(f"{_REF}.{key}", ref[key], what)
        for key in known
        if ref.get(key) is not None and key not in allowed
    ]


def _beside(job: ElasticJob, ref: dict[str, Any]) -> list[Wrong]:
    """Return the fields beside templateRef that the template has, unless it wrote them."""
    if "made" in ref:
        return []
    raw, wrong = merged_policy(job.spec)
    what = f"nothing beside templateRef: {TEMPLATE_KIND} {ref.get('name')} has it"
    # The API server writes defaults, which are no wish of the user's.
    return wrong + [
        _wrong(f"spec.{key}", value, what)
        for key, value in raw.items()
        if key not in _OWN and value != _DEFAULTS.get(key)
    ]


def _override(made: dict[str, Any], ref: dict[str, Any]) -> None:
    """Put the job's own values into the spec."""
    for key in ("minReplicas", "maxReplicas"):
        if ref.get(key) is not None:
            made[key] = ref[key]
    worker = made["replicaSpecs"]["Worker"]
    if ref.get("replicas") is not None:
        worker["replicas"] = ref["replicas"]
    containers = worker["template"]["spec"]["containers"]
    named = [one for one in containers if one.get("name") == CONTAINER]
    container = (named or containers)[0]
    if ref.get("image") is not None:
        container["image"] = ref["image"]
    if ref.get("args") is not None:
        container["args"] = [*(container.get("args") or []), *ref["args"]]
    if ref.get("env") is not None:
        ours = {one.get("name"): one for one in ref["env"]}
        kept = [one for one in container.get("env") or [] if one.get("name") not in ours]
        container["env"] = [*kept, *ours.values()]


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words) or "nothing"


def _wrong(path: str, value: Any, expected: str) -> Wrong:
    return Wrong(path=path, value=shown(value), expected=expected)
