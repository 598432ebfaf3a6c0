"""The job's conditions, and the phase that sums them up.

| condition | True while |
|---|---|
| Created | the operator has seen the job |
| Running | at least minReplicas pods run |
| Degraded | something keeps pods from running, or there were minReplicas and now are fewer |
| CrashLooping | workers, containers or pods fail again and again, and the step does not rise |
| Stalled | enough pods run, and the step has not risen for spec.stalledSeconds |
| Restarting | the replacement of a pod that ended early does not run yet |
| Suspended | spec.suspend |
| Succeeded, Failed | the job has ended so, for ever |

A condition's lastTransitionTime changes with its status, and lastUpdateTime with any of it; one
that says what it said is not touched, so a decision that changes nothing writes nothing. The one
that the phase is named after is the last, as the original's columns read it.
"""

from __future__ import annotations

import msgspec

from elastane.kubernetes.model import Condition, as_time
from elastane.kubernetes.reconcile.context import DecisionContext, JobVerdict
from elastane.kubernetes.reconcile.progress import JobProgress, stalled_since

_ORDER = (
    "Created",
    "Suspended",
    "Restarting",
    "Stalled",
    "CrashLooping",
    "Degraded",
    "Running",
    "Succeeded",
    "Failed",
)
# CrashLooping has an event of its own, with a count.
_QUIET = ("Created", "CrashLooping")
_WARNINGS = ("Degraded", "Restarting", "Stalled", "Failed")


class PodTally(msgspec.Struct, frozen=True, kw_only=True):
    """How many pods run, and of what there is to tell."""

    running: int
    living: int
    restarting: tuple[int, ...] = ()

    def is_short(self, least: int) -> bool:
        """Whether fewer run than can train."""
        return self.running < least


def tally(context: DecisionContext) -> PodTally:
    """Count the pods."""
    staying = [pod for pod in context.own if pod.lives and not pod.is_leaving]
    slots = set(context.slots)
    return PodTally(
        running=sum(pod.state == "running" for pod in staying),
        living=len(staying),
        restarting=tuple(
            sorted(i for i, trouble in context.troubles.items() if trouble.waiting and i in slots)
        ),
    )


def conditions_of(
    context: DecisionContext, verdict: JobVerdict | None, count: PodTally, progress: JobProgress
) -> dict[str, Condition]:
    """Return what is to be said, by type; conditions that do not apply are absent."""
    name = context.job.name
    made = {"Created": _true("Created", "ElasticJobCreated", f"ElasticJob {name} is created.")}
    if verdict is not None:
        made[verdict.kind] = _true(verdict.kind, verdict.reason, verdict.message)
        made["Running"] = _false("Running", verdict.reason, verdict.message)
        return made
    if context.settings.is_suspended:
        text = "spec.suspend is true: no pod may run"
        made["Suspended"] = _true("Suspended", "ElasticJobSuspended", text)
        made["Running"] = _false("Running", "ElasticJobSuspended", text)
        return made
    if context.ended_well_time is not None:
        text = f"a pod has succeeded; {count.living} are finishing"
        made["Running"] = _true("Running", "ElasticJobFinishing", text)
        return made
    made["Running"] = _running(context, count)
    degraded = _degraded(context, count)
    if degraded:
        made["Degraded"] = degraded
    made |= _without_progress(context, progress)
    if count.restarting:
        shown = ", ".join(str(index) for index in count.restarting[:8])
        shown += ", ..." if len(count.restarting) > 8 else ""
        text = f"{len(count.restarting)} pods are made again: worker {shown}"
        made["Restarting"] = _true("Restarting", "ElasticJobRestarting", text)
    return made


def _without_progress(context: DecisionContext, progress: JobProgress) -> dict[str, Condition]:
    """Return what is to be said of a job whose step does not rise."""
    made = {}
    if progress.is_crashing:
        crashes, incident = progress.crashes, context.before.last_incident
        where = f"above {crashes.step}" if crashes.step else "at all"
        text = f"{crashes.count} failures in a row without a step {where}"
        said = f"{text}; the last: {incident.cause}" if incident else text
        made["CrashLooping"] = _true("CrashLooping", "FailuresWithoutProgress", said)
        context.tell(
            "Warning", "CrashLooping", f"failures in a row, no step {where}", crashes.count
        )
    since = stalled_since(context, progress)
    if since:
        step = context.before.step or 0
        text = f"no step above {step} since {since}; spec.stalledSeconds is"
        text += f" {context.settings.spec.stalled_seconds}"
        made["Stalled"] = _true("Stalled", "NoProgress", text)
    return made


def _running(context: DecisionContext, count: PodTally) -> Condition:
    least, wanted = context.settings.min, context.settings.desired
    if not count.is_short(least):
        return _true("Running", "ElasticJobRunning", f"ElasticJob {context.job.name} is running.")
    text = f"{count.running} of {wanted} pods run, at least {least} are needed"
    if context.wants:
        return _false("Running", context.wants[0][0], f"{text}: {_wants(context)}")
    return _false("Running", "PodsPending", text)


def _degraded(context: DecisionContext, count: PodTally) -> Condition | None:
    least, wanted = context.settings.min, context.settings.desired
    has_run = context.first_start_time is not None
    is_short = count.is_short(least) and has_run
    if not is_short and not context.wants:
        return None
    text = f"{count.running} of {wanted} pods run"
    if count.is_short(least):
        text += f", at least {least} are needed"
    if context.wants:
        text += f": {_wants(context)}"
    reason = context.wants[0][0] if context.wants else "PodsLost"
    if is_short and reason not in ("InvalidSpec", "InvalidTemplate"):
        reason = "BelowMinimum"
    return _true("Degraded", reason, text)


def _wants(context: DecisionContext) -> str:
    more = len(context.wants) - 1
    return context.wants[0][1] + (f" (and {more} more)" if more else "")


def _true(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)


def _false(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="False", reason=reason, message=message)


def phase_of(made: dict[str, Condition], *, has_run: bool) -> str:
    """Return one word for all of it."""
    true = {kind for kind, one in made.items() if one.status == "True"}
    for kind in ("Failed", "Succeeded", "Suspended"):
        if kind in true:
            return kind
    if not has_run:
        return "Running" if "Running" in true else "Pending"
    for kind in ("Degraded", "CrashLooping", "Stalled", "Restarting", "Running"):
        if kind in true:
            return kind
    return "Pending"


def merged(
    before: tuple[Condition, ...], made: dict[str, Condition], edition: int, now_s: float
) -> tuple[Condition, ...]:
    """Return the conditions with their times, those that no longer hold as False."""
    known = {one.type: one for one in before}
    now = as_time(now_s)
    result = {}
    for kind in _ORDER:
        old, new = known.get(kind), made.get(kind)
        if new is None:
            if old is None:
                continue
            new = old if old.status == "False" else _false(kind, f"Not{kind}", "")
        result[kind] = _stamped(old, new, edition, now)
    return tuple(result.values())


def _stamped(old: Condition | None, new: Condition, edition: int, now: str) -> Condition:
    said = (new.status, new.reason, new.message, edition)
    if old is not None and said == (old.status, old.reason, old.message, old.observed_generation):
        return old
    is_same = old is not None and old.status == new.status
    return msgspec.structs.replace(
        new,
        observed_generation=edition,
        last_update_time=now,
        last_transition_time=old.last_transition_time if old is not None and is_same else now,
    )


def last_is(conditions: tuple[Condition, ...], phase: str) -> tuple[Condition, ...]:
    """Return the conditions, the one of that type last."""
    return tuple(sorted(conditions, key=lambda one: one.type == phase))


def tell_changes(context: DecisionContext, after: tuple[Condition, ...]) -> None:
    """Have an Event told for each condition that has become True, as the original named them."""
    for one in after:
        old = context.before.condition(one.type)
        was = old is not None and old.status == "True"
        if one.status == "True" and not was and one.type not in _QUIET:
            reason = f"ElasticJob{one.type}"
            context.tell("Warning" if one.type in _WARNINGS else "Normal", reason, one.message)
