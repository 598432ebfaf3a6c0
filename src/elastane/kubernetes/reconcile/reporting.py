"""The whole status of a job, made from a decision context: for people and for the next decision."""

from __future__ import annotations

import msgspec

from elastane.kubernetes.bridge.messages import JobReport
from elastane.kubernetes.model import JobStatus, as_time
from elastane.kubernetes.model.names import REPLICA_TYPE, selector
from elastane.kubernetes.model.status import Crashes, IncidentStatus, ReplicaStatus, WorkerStatus
from elastane.kubernetes.reconcile.bounds import TEXT_CHARS_MAX, WORKERS_TOLD_MAX
from elastane.kubernetes.reconcile.conditions import (
    conditions_of,
    last_is,
    merged,
    phase_of,
    tally,
    tell_changes,
)
from elastane.kubernetes.reconcile.context import DecisionContext, JobVerdict
from elastane.kubernetes.reconcile.pods import Judged
from elastane.kubernetes.reconcile.progress import current_report, follow


def status_of(context: DecisionContext, verdict: JobVerdict | None) -> JobStatus:
    """Return the status; tells Events of what has changed in it."""
    edition = context.job.edition
    count = tally(context)
    progress = follow(context)
    made = conditions_of(context, verdict, count, progress)
    conditions = merged(context.before.conditions, made, edition, context.now_s)
    phase = phase_of(made, has_run=context.first_start_time is not None)
    tell_changes(context, conditions)
    slots = set(context.slots)
    said = _said(context)
    return JobStatus(
        phase=phase,
        observed_generation=edition,
        conditions=last_is(conditions, phase),
        replica_statuses={REPLICA_TYPE: _replicas(context)},
        replicas=count.living,
        ready_replicas=count.running,
        desired_replicas=context.settings.desired,
        outdated=sum(pod.lives and pod.is_outdated for pod in context.own),
        selector=selector(context.job.name),
        start_time=context.start_time,
        completion_time=context.completion_time,
        ended_well_time=context.ended_well_time,
        first_start_time=context.first_start_time,
        stuck_since_time=context.stuck_since_time,
        restarts=context.restarts + progress.worker_restarts,
        worker_restarts=progress.worker_restarts,
        failures=context.failures,
        disruptions=context.disruptions,
        round=said.round,
        world_size=said.world_size,
        step=said.step,
        steps_per_second=said.steps_per_second,
        last_progress_time=progress.last_time,
        crashes=progress.crashes if progress.crashes != Crashes() else None,
        last_incident=said.last_incident,
        last_failure=context.last_failure,
        workers=_workers(context),
        workers_omitted=max(0, len(context.own) - WORKERS_TOLD_MAX),
        counted=tuple(context.counted),
        fenced=tuple(context.fenced),
        in_place=tuple(context.in_place.values()),
        troubles=tuple(one for i, one in sorted(context.troubles.items()) if i in slots),
        nodes=tuple(context.nodes.values()),
    )


def _replicas(context: DecisionContext) -> ReplicaStatus:
    own = context.own
    return ReplicaStatus(
        active=sum(pod.lives for pod in own),
        succeeded=sum(pod.state == "succeeded" for pod in own),
        failed=sum(pod.state == "failed" for pod in own),
    )


def _said(context: DecisionContext) -> JobStatus:
    """Return what the coordinator last reported about the pods that live.

    Without a report, or before its coordinator knows any pod, the status stays as it is. A report
    that names none of the living pods is about a world of before, as after a suspension.
    """
    report: JobReport | None = context.seen.report
    living = {pod.uid for pod in context.own if pod.lives and not pod.is_leaving}
    if not living:
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
    """Return the pods for people: those in trouble first, so that these are never left out."""
    report = context.seen.report
    ranks = {one.pod: one.rank for one in report.members} if report else {}
    in_trouble_first = sorted(context.own, key=lambda pod: (_is_well(pod), pod.index, pod.name))
    told = sorted(in_trouble_first[:WORKERS_TOLD_MAX], key=lambda pod: (pod.index, pod.name))
    return tuple(_worker(pod, ranks.get(pod.uid, -1)) for pod in told)


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
