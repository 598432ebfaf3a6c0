"""The operator's HTTP interface: liveness, readiness, and its figures.

Owns the paths and the metrics' names. Answers come from memory. A gauge of one job is labelled by
its namespace and name, so the number of series is that of the cluster's jobs times `_OF_A_JOB`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from elastane.kubernetes.model import since_epoch
from elastane.kubernetes.operator.metrics import CONTENT_TYPE, Metrics, labels
from elastane.process.health import HttpAnswer

if TYPE_CHECKING:
    from elastane.kubernetes.operator.session import OperatorSession

_COUNTERS = {
    "elastane_reconciles_total": "Decisions about jobs, by result.",
    "elastane_writes_total": "Writes to the API server, by kind and answer.",
    "elastane_refusals_total": "Creations that the API server refused for good, by answer.",
    "elastane_adopted_total": "Objects of a job that were there when they were to be created.",
    "elastane_relists_total": "Lists that had to be read again, by kind.",
    "elastane_watch_errors_total": "Lists and watches that failed, by kind.",
    "elastane_events_total": "Events on jobs: written, or dropped.",
}


# Name: (help, field of the job's status).
_OF_A_JOB = {
    "elastane_job_step": ("Steps that the job has committed.", "step"),
    "elastane_job_steps_per_second": ("Pace of the job.", "stepsPerSecond"),
    "elastane_job_world_size": ("Workers in the current world.", "worldSize"),
    "elastane_job_pods_ready": ("Pods of the job that run.", "readyReplicas"),
    "elastane_job_restarts": ("Pods replaced, containers and workers restarted.", "restarts"),
    "elastane_job_failures": ("Restarts that count towards backoffLimit.", "failures"),
    "elastane_job_disruptions": ("Pods that the cluster took away.", "disruptions"),
    "elastane_job_last_progress_timestamp_seconds": (
        "When the step was last seen to move, in seconds since the epoch.",
        "lastProgressTime",
    ),
}


def make_metrics() -> Metrics:
    """Return the operator's metrics, all at 0."""
    metrics = Metrics()
    for name, what in _COUNTERS.items():
        metrics.counter(name, what)
    metrics.histogram("elastane_reconcile_seconds", "From a job's turn to its last write.")
    return metrics


class Probes:
    """Answers `/healthz`, `/readyz` and `/metrics`.

    `ready()` returns the obstacles to readiness, a line each; `session()` the current session.
    """

    def __init__(
        self,
        metrics: Metrics,
        ready: Callable[[], list[str]],
        session: Callable[[], OperatorSession | None],
    ) -> None:
        self._metrics = metrics
        self._ready = ready
        self._session = session
        gauges: dict[str, tuple[str, Callable[[OperatorSession], dict[str, float]]]] = {
            "elastane_jobs": ("ElasticJobs, by phase.", _jobs),
            "elastane_pods": ("Pods of ElasticJobs, by phase.", _pods),
            "elastane_queue_depth": ("Jobs that wait for a worker.", _depth),
            "elastane_workers_busy": ("Jobs that are with a worker.", _busy),
        }
        for name, (what, read) in gauges.items():
            metrics.gauge(name, what, self._of_session(read))
        for name, (what, field) in _OF_A_JOB.items():
            metrics.gauge(name, what, self._of_session(partial(_of_each_job, field)))
        metrics.gauge(
            "elastane_operator_leader",
            "1 while this operator has the lease.",
            lambda: {"": float(self._session() is not None)},
        )

    def answer(self, method: str, path: str) -> HttpAnswer:
        """Return the answer to a request."""
        if not method:
            return HttpAnswer(400, b"no request of HTTP\n")
        if method not in ("GET", "HEAD"):
            return HttpAnswer(405, b"GET or HEAD\n")
        if path == "/healthz":
            return HttpAnswer(200, b"ok\n")
        if path == "/metrics":
            return HttpAnswer(200, self._metrics.text().encode(), CONTENT_TYPE)
        if path == "/readyz":
            against = self._ready()
            text = "\n".join(against) or "ok"
            return HttpAnswer(503 if against else 200, f"{text}\n".encode())
        return HttpAnswer(404, b"/healthz, /readyz or /metrics\n")

    def _of_session(
        self, read: Callable[[OperatorSession], dict[str, float]]
    ) -> Callable[[], dict[str, float]]:
        def value() -> dict[str, float]:
            session = self._session()
            return read(session) if session is not None else {}

        return value


def _jobs(session: OperatorSession) -> dict[str, float]:
    return _by_phase(_phase(job.status) for job in session.view.jobs)


def _pods(session: OperatorSession) -> dict[str, float]:
    return _by_phase(pod.status.phase for pod in session.view.pods)


def _depth(session: OperatorSession) -> dict[str, float]:
    return {"": float(len(session.queue))}


def _busy(session: OperatorSession) -> dict[str, float]:
    return {"": float(session.queue.working)}


def _of_each_job(field: str, session: OperatorSession) -> dict[str, float]:
    """Return a number from the status of each job that has it, by the labels of the job."""
    made = {}
    for job in session.view.jobs:
        value = job.status.get(field) if isinstance(job.status, dict) else None
        if isinstance(value, str):
            value = since_epoch(value)
        if isinstance(value, int | float):
            meta = job.metadata
            made[labels(namespace=meta.namespace, job=meta.name)] = float(value)
    return made


def _phase(status: Any) -> str:
    phase = status.get("phase") if isinstance(status, dict) else None
    return phase if isinstance(phase, str) else ""


def _by_phase(phases: Any) -> dict[str, float]:
    return {labels(phase=phase or "none"): float(n) for phase, n in Counter(phases).items()}
