"""The whole status of a job, made from a decision context: for people and for the next decision.

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

A condition's lastTransitionTime changes with its status, and lastUpdateTime with any of its fields.
An unchanged condition keeps both, so a decision that changes nothing writes nothing. The condition
that the phase is named after comes last, since the original controller's columns read the last one.

An agent restarts a failed worker inside its pod, so a job may make no progress while all pods run.
The coordinator's report has the job's step and the restarts of its workers. The status keeps two
facts for later decisions: when the step last rose, and the failures since its highest value.
"""

from __future__ import annotations

import msgspec

from elastane.kubernetes.model import Condition, JobStatus, as_time, since_epoch
from elastane.kubernetes.model.names import REPLICA_TYPE, selector
from elastane.kubernetes.model.observed import JobReport
from elastane.kubernetes.model.status import Crashes, IncidentStatus, ReplicaStatus, WorkerStatus
from elastane.kubernetes.reconcile.bounds import (
    CRASH_LOOP_MIN,
    QUICK_S,
    TEXT_CHARS_MAX,
    WORKERS_TOLD_MAX,
)
from elastane.kubernetes.reconcile.context import DecisionContext, JobVerdict
from elastane.kubernetes.reconcile.pods import Judged


def status_of(context: DecisionContext, verdict: JobVerdict | None) -> JobStatus:
    """Return the status, and report an Event for each change of it."""
    edition = context.job.edition
    count = tally(context)
    progress = follow(context)
    made = conditions_of(context, verdict, count, progress)
    conditions = merged(context.before.conditions, made, edition, context.now_s)
    phase = phase_of(made, has_run=context.first_start_time is not None)
    report_changes(context, conditions)
    slots = set(context.slots)
    reported = _report_fields(context)
    return JobStatus(
        phase=phase,
        observed_generation=edition,
        conditions=last_is(conditions, phase),
        replica_statuses={REPLICA_TYPE: _replicas(context)},
        replicas=count.alive,
        ready_replicas=count.running,
        desired_replicas=context.settings.desired,
        outdated=sum(pod.lives and pod.is_outdated for pod in context.own),
        selector=selector(context.job.name),
        job_template=_job_template(context),
        start_time=context.start_time,
        completion_time=context.completion_time,
        ended_well_time=context.ended_well_time,
        first_start_time=context.first_start_time,
        stuck_since_time=context.stuck_since_time,
        restarts=context.restarts + progress.worker_restarts,
        worker_restarts=progress.worker_restarts,
        failures=context.failures,
        disruptions=context.disruptions,
        round=reported.round,
        world_size=reported.world_size,
        step=reported.step,
        steps_per_second=reported.steps_per_second,
        last_progress_time=progress.last_time,
        crashes=progress.crashes if progress.crashes != Crashes() else None,
        last_incident=reported.last_incident,
        last_failure=context.last_failure,
        workers=_workers(context),
        workers_omitted=max(0, len(context.own) - WORKERS_TOLD_MAX),
        counted=tuple(context.counted),
        fenced=tuple(context.fenced),
        in_place=tuple(context.in_place.values()),
        early_ends=tuple(one for i, one in sorted(context.early_ends.items()) if i in slots),
        nodes=tuple(context.nodes.values()),
    )


def _job_template(context: DecisionContext) -> str:
    ref = context.settings.spec.template_ref
    made = ref.made if ref is not None else None
    return "" if ref is None or made is None else f"{ref.name}, edition {made.edition}"


def _replicas(context: DecisionContext) -> ReplicaStatus:
    own = context.own
    return ReplicaStatus(
        active=sum(pod.lives for pod in own),
        succeeded=sum(pod.state == "succeeded" for pod in own),
        failed=sum(pod.state == "failed" for pod in own),
    )


def _report_fields(context: DecisionContext) -> JobStatus:
    """Return the fields of the status that come from the coordinator's last report.

    Without a report, or before the coordinator knows any pod, the status stays as it is. A report
    that names no living pod is about an earlier world, for instance after a suspension.
    """
    report: JobReport | None = context.seen.report
    alive = {pod.uid for pod in context.own if pod.lives and not pod.is_leaving}
    if not alive:
        stands = _reported(context, report) if report else context.before
        return msgspec.structs.replace(stands, world_size=0, steps_per_second=0.0)
    if report is None or not report.members:
        return context.before
    if current_report(context) is None:
        incident = context.before.last_incident
        return JobStatus(world_size=0, steps_per_second=0.0, last_incident=incident)
    return _reported(context, report)


def _reported(context: DecisionContext, report: JobReport) -> JobStatus:
    incident = None
    if report.incident:
        text = " ".join(report.incident.split())[:TEXT_CHARS_MAX]
        incident = IncidentStatus(cause=text, time=as_time(report.incident_at_s))
    return JobStatus(
        round=report.round,
        world_size=report.world_size,
        step=report.step,
        steps_per_second=float(f"{report.steps_per_s:.3g}"),
        last_incident=incident or context.before.last_incident,
    )


def _workers(context: DecisionContext) -> tuple[WorkerStatus, ...]:
    """Return the pods for people, in the order of indices; failing ones are never left out."""
    report = context.seen.report
    ranks = {one.pod: one.rank for one in report.members} if report else {}
    failing_first = sorted(context.own, key=lambda pod: (_is_well(pod), pod.index, pod.name))
    shown = sorted(failing_first[:WORKERS_TOLD_MAX], key=lambda pod: (pod.index, pod.name))
    return tuple(_worker(pod, ranks.get(pod.uid, -1)) for pod in shown)


def _is_well(pod: Judged) -> bool:
    return pod.state in ("running", "succeeded") and not pod.is_leaving


def _worker(pod: Judged, rank: int) -> WorkerStatus:
    ending, hindrance = pod.ending, pod.hindrance
    reason = ending.cause if ending else hindrance.reason if hindrance else ""
    code = ending.code if ending else 0 if pod.state == "succeeded" else None
    return WorkerStatus(
        index=pod.index,
        pod=pod.name,
        node=pod.node,
        state="leaving" if pod.is_leaving and pod.lives else pod.state,
        reason=reason,
        exit_code=code,
        restarts=pod.restarts,
        rank=rank if rank >= 0 else None,
    )


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
    """How many pods run and are alive, and which indices wait for a replacement."""

    running: int
    alive: int
    restarting: tuple[int, ...] = ()

    def is_short(self, least: int) -> bool:
        """Whether fewer pods run than training needs."""
        return self.running < least


def tally(context: DecisionContext) -> PodTally:
    """Count the pods."""
    staying = [pod for pod in context.own if pod.lives and not pod.is_leaving]
    slots = set(context.slots)
    return PodTally(
        running=sum(pod.state == "running" for pod in staying),
        alive=len(staying),
        restarting=tuple(
            sorted(i for i, early in context.early_ends.items() if early.waiting and i in slots)
        ),
    )


def conditions_of(
    context: DecisionContext, verdict: JobVerdict | None, count: PodTally, progress: JobProgress
) -> dict[str, Condition]:
    """Return the conditions that hold, by type."""
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
        text = f"a pod has succeeded; {count.alive} are finishing"
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
        number = len(count.restarting)
        pods = "1 pod is" if number == 1 else f"{number} pods are"
        text = f"{pods} being replaced: worker {shown}"
        made["Restarting"] = _true("Restarting", "ElasticJobRestarting", text)
    return made


def _without_progress(context: DecisionContext, progress: JobProgress) -> dict[str, Condition]:
    """Return the conditions of a job whose step does not rise."""
    made = {}
    if progress.is_crashing:
        crashes, incident = progress.crashes, context.before.last_incident
        where = f"above {crashes.step}" if crashes.step else "at all"
        text = f"{crashes.count} failures in a row without a step {where}"
        said = f"{text}; the last: {incident.cause}" if incident else text
        made["CrashLooping"] = _true("CrashLooping", "FailuresWithoutProgress", said)
        context.report(
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
    if context.shortfalls:
        return _false("Running", context.shortfalls[0][0], f"{text}: {_shortfall_text(context)}")
    return _false("Running", "PodsPending", text)


def _degraded(context: DecisionContext, count: PodTally) -> Condition | None:
    least, wanted = context.settings.min, context.settings.desired
    has_run = context.first_start_time is not None
    is_short = count.is_short(least) and has_run
    if not is_short and not context.shortfalls:
        return None
    text = f"{count.running} of {wanted} pods run"
    if count.is_short(least):
        text += f", at least {least} are needed"
    if context.shortfalls:
        text += f": {_shortfall_text(context)}"
    reason = context.shortfalls[0][0] if context.shortfalls else "PodsLost"
    if is_short and reason not in ("InvalidSpec", "InvalidTemplate"):
        reason = "BelowMinimum"
    return _true("Degraded", reason, text)


def _shortfall_text(context: DecisionContext) -> str:
    more = len(context.shortfalls) - 1
    return context.shortfalls[0][1] + (f" (and {more} more)" if more else "")


def _true(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)


def _false(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="False", reason=reason, message=message)


def phase_of(made: dict[str, Condition], *, has_run: bool) -> str:
    """Return the phase, one word for all conditions."""
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
    """Return the conditions, with the one of this type last."""
    return tuple(sorted(conditions, key=lambda one: one.type == phase))


def report_changes(context: DecisionContext, after: tuple[Condition, ...]) -> None:
    """Report an Event for each condition that has become True, named as in the original."""
    for one in after:
        old = context.before.condition(one.type)
        was = old is not None and old.status == "True"
        if one.status == "True" and not was and one.type not in _QUIET:
            reason = f"ElasticJob{one.type}"
            context.report("Warning" if one.type in _WARNINGS else "Normal", reason, one.message)


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a job. `last_time`: when the step last rose.

    `worker_restarts` counts restarts of workers by the agents, within their pods.
    """

    worker_restarts: int = 0
    last_time: str | None = None
    crashes: Crashes = Crashes()

    @property
    def is_crashing(self) -> bool:
        """Whether the job has failed CRASH_LOOP_MIN times in a row without a new step."""
        return self.crashes.count >= CRASH_LOOP_MIN


def current_report(context: DecisionContext) -> JobReport | None:
    """Return the coordinator's report if it names any living pod."""
    report = context.seen.report
    alive = {pod.uid for pod in context.own if pod.lives and not pod.is_leaving}
    known = {member.pod for member in report.members} if report is not None else set[str]()
    return None if alive.isdisjoint(known) else report


def follow(context: DecisionContext) -> JobProgress:
    """Return the progress of the job."""
    before, report = context.before, current_report(context)
    step = report.step if report is not None else 0
    restarts = max(before.worker_restarts, report.restarts if report is not None else 0)
    failures = restarts - before.worker_restarts + max(0, context.failures - before.failures)
    is_ahead = step > (before.step or 0)
    return JobProgress(
        worker_restarts=restarts,
        last_time=as_time(context.now_s) if is_ahead else before.last_progress_time,
        crashes=_crashes(context, before.crashes or Crashes(), step, failures),
    )


def _crashes(context: DecisionContext, before: Crashes, step: int, failures: int) -> Crashes:
    """Count failures in a row; a new highest step ends the row, and so does QUICK_S without any."""
    last_s = since_epoch(before.time)
    is_over = step > before.step or (last_s is not None and context.now_s >= last_s + QUICK_S)
    count = failures + (0 if is_over else before.count)
    time = as_time(context.now_s) if failures else before.time if count else None
    if count:
        context.wake((since_epoch(time) or context.now_s) + QUICK_S)
    return Crashes(count=count, step=max(step, before.step), time=time)


def stalled_since(context: DecisionContext, progress: JobProgress) -> str | None:
    """Return since when a job that could train has made no step; None if not for too long.

    The time begins when enough pods run. An unmodified script reports no steps, so its job is never
    stalled.
    """
    limit_s = context.settings.spec.stalled_seconds
    report, running = current_report(context), context.before.condition("Running")
    if not limit_s or report is None or not (report.step and report.world_size):
        return None
    if running is None or running.status != "True":
        return None
    last_s = since_epoch(progress.last_time) or context.now_s
    last_s = max(last_s, since_epoch(running.last_transition_time) or last_s)
    context.wake(last_s + limit_s)
    return as_time(last_s) if context.now_s >= last_s + limit_s else None
