"""The events that an agent records, and the metrics of how its runs end.

A base class of SimpleElasticAgent, so that subclasses find every method under torch's name.
"""

from __future__ import annotations

import json
import socket
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from elastane.elastic.agent.server._spec import RunResult, Worker, WorkerGroup, WorkerState
from elastane.elastic.events import Event, EventSource, record
from elastane.elastic.metrics import put_metric


def _get_fq_hostname() -> str:
    return socket.getfqdn(socket.gethostname())


class EventRecorder:
    """Records events and metrics of an agent."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int

    def get_event_failed(self) -> Event:
        """Return the event of a failed agent, with the exception that is being handled."""
        return self._construct_event(
            state="FAILED", source=EventSource.AGENT, raw_error=traceback.format_exc()
        )

    def get_event_succeeded(self) -> Event:
        """Return the event of an agent that completed, whether or not its workers succeeded."""
        return self._construct_event(state="SUCCEEDED", source=EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Generator[None, None, None]:
        """Record how long the context took."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - started_s) * 1000
            self._record(
                self._construct_event(state=state, source=EventSource.AGENT, duration_ms=took_ms)
            )

    def _record(self, event: Event) -> None:
        record(event, self._worker_group.spec.event_log_handler)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._record(
                self._construct_event(
                    state=self._get_worker_state(worker, result),
                    source=EventSource.WORKER,
                    worker=worker,
                    raw_error=json.dumps(failure.error_file_data) if failure else None,
                    exit_code=failure.exitcode if failure else None,
                    worker_pid=failure.pid if failure else None,
                )
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        failure = result.failures.get(worker.global_rank)
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not failure:
            return "TERMINATED"  # by the agent, since another worker failed
        if failure or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"Unknown worker: {worker.global_rank}")

    def _construct_event(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group = self._worker_group
        spec = group.spec
        more: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker:
            # Tuples of one, as torch records them.
            more["local_rank"] = (worker.local_rank,)
            more["role_rank"] = (worker.role_rank,)
            more["role_world_size"] = (worker.role_world_size,)
            more["exit_code"] = (exit_code,)
            more["worker_pid"] = (worker_pid,)
        return Event(
            f"torchelastic.worker.status.{state}",
            source=source,
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": worker.global_rank if worker else None,
                "group_rank": group.group_rank,
                "worker_id": str(worker.id) if worker else None,
                "role": spec.role,
                "hostname": _get_fq_hostname(),
                "state": state,
                "total_run_time": self._total_execution_time,
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": raw_error,
                "metadata": json.dumps(more),
                "agent_restarts": spec.max_restarts - self._remaining_restarts,
                "duration_ms": duration_ms,
            },
        )

    def _record_metrics(self, group_results: RunResult) -> None:
        spec = self._worker_group.spec
        put_run_metrics(
            spec.role, group_results.is_failed(), self._remaining_restarts, spec.max_restarts
        )


def put_run_metrics(role: str, is_failed: bool, remaining: int, allowed: int) -> None:
    """Publish the metrics of a run's end, under torch's names.

    `remaining` of the `allowed` restarts were not used. `flakiness` is in percent.
    """
    retried = remaining != allowed
    left = 0.0 if is_failed else (remaining + 1) / (allowed + 1)
    for name, value in (
        ("flakiness", int(100.0 - 100.0 * left)),
        ("run_total", 1),
        ("run_success_with_retries", int(not is_failed and retried)),
        ("run_success_no_retries", int(not is_failed and not retried)),
        ("run_failed_with_retries", int(is_failed and retried)),
        ("run_failed_no_retries", int(is_failed and not retried)),
    ):
        put_metric(f"workers.{role}.{name}", value)
