"""The output of `elastane kubernetes status`: one ElasticJob in depth, for a person.

`look` asks the API server with five requests; `lines` and `as_json` are pure. How it fails:
ApiError, ConfigurationError if no server is found, UsageError if there is no such job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from elastane.cli.status import duration
from elastane.errors import UsageError
from elastane.kubernetes.client import Api, ApiError, ClusterAccess, Selector
from elastane.kubernetes.client.resource import EVENTS, PODS
from elastane.kubernetes.model import (
    Condition,
    ElasticJob,
    JobStatus,
    JobTemplate,
    Pod,
    as_wire,
    read_status,
    since_epoch,
)
from elastane.kubernetes.model.names import CONTAINER, LABEL_INDEX, selector
from elastane.kubernetes.model.observed import ContainerStatus
from elastane.kubernetes.operator.view import JOBS, TEMPLATES
from elastane.kubernetes.reconcile.settings import is_managed_elsewhere

# More than fit on a screen are counted, not listed.
PODS_SHOWN_MAX = 40
EVENTS_SHOWN_MAX = 10
_COLUMNS = ("pod", "node", "phase", "rank", "restarts", "last exit")
_LABEL_CHARS = 15


class EventSeen(msgspec.Struct, rename="camel"):
    """The fields of a Kubernetes Event that the view shows."""

    type: str = ""
    reason: str = ""
    message: str = ""
    count: int | None = None
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def at(self) -> str:
        """When it occurred last."""
        return self.last_timestamp or self.event_time or ""


class FoundObjects(msgspec.Struct):
    """A job, its pods, its events and its template."""

    job: ElasticJob
    status: JobStatus
    pods: Sequence[Pod]
    events: Sequence[EventSeen]
    # The ElasticJobTemplate that the job names, as it is now.
    template: JobTemplate | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the job ended with a failure."""
        return self.status.is_("Failed")


async def look(access: ClusterAccess, name: str) -> FoundObjects:
    """Ask the API server about a job."""
    namespace = access.namespace or "default"
    async with Api(access) as api:
        job = await api.find(JOBS, namespace, name, ElasticJob)
        if job is None:
            raise UsageError(
                f"there is no ElasticJob {name} in namespace {namespace}",
                slug="no-such-job",
                where=access.where,
                next_step="kubectl get ej --all-namespaces",
            )
        pods = await api.list(PODS, namespace, Pod, Selector(labels=selector(name)))
        events = await _events(api, namespace, job)
        template = await _named_template(api, job)
    ordered = sorted(pods.items, key=lambda pod: (_index(pod), pod.metadata.name))
    return FoundObjects(job, read_status(job.status), ordered, events, template)


async def _named_template(api: Api, job: ElasticJob) -> JobTemplate | None:
    """Return the job's template; None if it has none, or if it may not be read."""
    ref = job.spec.get("templateRef") if isinstance(job.spec, dict) else None
    if not isinstance(ref, dict):
        return None
    try:
        return await api.find(TEMPLATES, job.metadata.namespace, str(ref["name"]), JobTemplate)
    except ApiError:
        return None


async def _events(api: Api, namespace: str, job: ElasticJob) -> list[EventSeen]:
    """Return the job's events; empty if they may not be read."""
    chosen = Selector(fields=f"involvedObject.uid={job.metadata.uid}")
    try:
        page = await api.list(EVENTS, namespace, EventSeen, chosen)
    except ApiError:
        return []
    return sorted(page.items, key=lambda event: event.at)


def as_json(found: FoundObjects) -> str:
    """Return the job, its pods and its events as JSON fields."""
    shown = {
        "job": found.job.metadata.name,
        "namespace": found.job.metadata.namespace,
        "spec": found.job.spec,
        "status": as_wire(found.status),
        "pods": found.pods,
        "events": found.events,
    }
    return msgspec.json.format(msgspec.json.encode(shown)).decode()


def lines(found: FoundObjects) -> list[str]:
    """Return the screen of a job."""
    status = found.status
    head = [f"{found.job.metadata.namespace}/{found.job.metadata.name}: {status.phase or 'new'}"]
    head += [_line(label, text) for label, text in _facts(found) if text]
    return [
        *head,
        "",
        *[_condition_line(one) for one in status.conditions],
        "",
        *_pod_table(found),
        *(["", *_event_lines(found.events)] if found.events else []),
    ]


def _facts(found: FoundObjects) -> list[tuple[str, str]]:
    status, spec = found.status, found.job.spec
    low, high = spec.get("minReplicas"), spec.get("maxReplicas")
    bounds = f" (min {low}, max {high})" if low or high else ""
    world = "" if status.round is None else f"round {status.round}, {status.world_size} workers"
    pace = "" if status.steps_per_second is None else f", {status.steps_per_second:.3g} a second"
    incident, failure = status.last_incident, status.last_failure
    return [
        ("operator", _operator(found)),
        ("pods", f"{status.ready_replicas} ready, {status.desired_replicas} wanted{bounds}"),
        ("template", _template(found)),
        ("outdated", f"{status.outdated} of an older template" if status.outdated else ""),
        ("world", world),
        ("step", "" if status.step is None else f"{status.step}{pace}"),
        ("restarts", _restarts(status)),
        ("last incident", "" if incident is None else f"{incident.cause}{_ago(incident.time)}"),
        ("last failure", "" if failure is None else f"{failure.cause}{_ago(failure.time)}"),
        ("started", _span(status)),
    ]


def _template(found: FoundObjects) -> str:
    """Return of what the job was made, and whether that was changed since."""
    made, now = found.status.job_template, found.template
    if not made or now is None or made == f"{now.metadata.name}, edition {now.metadata.edition}":
        return made
    return f"{made} (it has {now.metadata.edition} by now; the job keeps what it was made of)"


def _operator(found: FoundObjects) -> str:
    if is_managed_elsewhere(found.job):
        return f"leaves the job to {found.job.spec['managedBy']}"
    is_late = found.status.observed_generation < found.job.metadata.edition
    return "has not acted on the newest spec" if is_late else ""


def _restarts(status: JobStatus) -> str:
    workers = f", {status.worker_restarts} of workers" if status.worker_restarts else ""
    return f"{status.restarts}, of them {status.failures} failures{workers}"


def _span(status: JobStatus) -> str:
    if not status.start_time:
        return ""
    ended = f", ended{_ago(status.completion_time)}" if status.completion_time else ""
    return f"{status.start_time}{_ago(status.start_time)}{ended}"


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_CHARS}}{text}"


def _condition_line(one: Condition) -> str:
    said = f"{one.reason}: {one.message}" if one.message else one.reason
    return f"  {one.type:<{_LABEL_CHARS}}{one.status:<8}{said}{_ago(one.last_transition_time)}"


def _pod_table(found: FoundObjects) -> list[str]:
    if not found.pods:
        return ["  no pods"]
    ranks = {one.pod: one.rank for one in found.status.workers if one.rank is not None}
    shown = found.pods[:PODS_SHOWN_MAX]
    rows = [_COLUMNS, *(_pod_row(pod, ranks.get(pod.metadata.name)) for pod in shown)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS) - 1)]
    table = [
        "  " + "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    rest = len(found.pods) - len(shown)
    return [line.rstrip() for line in table] + ([f"  and {rest} more"] if rest else [])


def _pod_row(pod: Pod, rank: int | None) -> tuple[str, ...]:
    worker = _worker(pod)
    leaving = pod.metadata.is_leaving
    return (
        pod.metadata.name,
        pod.spec.node_name or "-",
        "Terminating" if leaving else _phase(pod, worker),
        "-" if rank is None or rank < 0 else str(rank),
        str(worker.restart_count if worker else 0),
        _last_exit(worker),
    )


def _worker(pod: Pod) -> ContainerStatus | None:
    found = pod.status.container_statuses
    named = (one for one in found if one.name == CONTAINER)
    return next(named, found[0] if len(found) == 1 else None)


def _phase(pod: Pod, worker: ContainerStatus | None) -> str:
    """The phase, or what keeps the pod from running, as kubectl shows it."""
    waiting = worker.state.waiting if worker else None
    return (waiting.reason if waiting else "") or pod.status.reason or pod.status.phase


def _last_exit(worker: ContainerStatus | None) -> str:
    ended = worker and (worker.state.terminated or worker.last_state.terminated)
    if not ended:
        return "-"
    how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.exit_code}"
    why = f", {ended.reason}" if ended.reason not in ("", "Error", "Completed") else ""
    return f"{how}{why}{_ago(ended.finished_at)}"


def _event_lines(events: Sequence[EventSeen]) -> list[str]:
    shown = [f"  {'events':<{_LABEL_CHARS}}"]
    for event in events[-EVENTS_SHOWN_MAX:]:
        times = f" ({event.count} times)" if (event.count or 1) > 1 else ""
        sign = "!" if event.type == "Warning" else " "
        shown.append(f" {sign}{event.at[:19]}Z {event.reason}: {event.message}{times}")
    return shown


def _ago(stamp: str | None) -> str:
    at_s = since_epoch(stamp)
    return "" if at_s is None else f" ({duration(max(0.0, time.time() - at_s))} ago)"


def _index(pod: Pod) -> int:
    text = pod.metadata.labels.get(LABEL_INDEX, "")
    return int(text) if text.isdecimal() else 0
