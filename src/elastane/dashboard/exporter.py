"""Serves the metrics of the jobs on this machine to Prometheus (`elastane metrics`).

It follows each job that has an agent here, from the job's event log. It asks a coordinator only if
that runs on this machine, so that a coordinator has one exporter that asks, however many nodes the
job has. A job that ended is served for some minutes more, so that its last state is scraped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from elastane.dashboard.following import JobFollower
from elastane.dashboard.metrics import MeasuredState, RunTotals, families
from elastane.observe.events import PlacedEvent
from elastane.observe.view import JobView
from elastane.process.files import JobEntry, JobRegistry, safe_name
from elastane.process.health import AnswerServer, HttpAnswer
from elastane.process.tls import TlsConfig

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)
# Agents come and go: the registry is read this often.
LOOK_S = 2.0
# Prometheus scrapes every minute at most, and may be away for a while.
KEPT_S = 900.0
# A machine with more jobs than this at once is not one that trains.
JOBS_MAX = 64
# Two scrapers, or one that asks again and again, share an answer.
ANSWER_S = 1.0


class MeasuredJob(JobFollower):
    """One job that is followed for its metrics."""

    def __init__(
        self,
        key: str,
        folder: Path,
        find_agents: Callable[[str], list[JobEntry]],
        tls: TlsConfig | None,
    ) -> None:
        super().__init__(key, folder, find_agents, tls)
        self.seen_s = time.monotonic()
        self._totals = RunTotals()

    def measured(self) -> MeasuredState:
        """Return what is known of the job now."""
        return MeasuredState(time.time(), self.sections(), self._totals, self.report)

    def _note(self, placed: PlacedEvent, before: JobView) -> None:
        if self.view.run != before.run:
            self._totals = RunTotals()
        self._totals.note(placed.event)

    async def _publish(self) -> None:
        now_s = time.time() if self._has_read.is_set() else self.view.last_s or 0.0
        self._totals.add(self.view.incidents, now_s)

    def _is_to_ask(self) -> bool:
        here = self.nodes_here
        return any(node.coordinates and name in here for name, node in self.view.nodes.items())


class MetricsExporter:
    """Follows the jobs of this machine, and answers scrapes with their metrics.

    `chosen`: the folder of a job that is served whether it runs here or not. `only`: its name, if
    no other job is served.
    """

    def __init__(
        self,
        registry: JobRegistry,
        chosen: Path | None = None,
        tls: TlsConfig | None = None,
        *,
        only: str = "",
    ) -> None:
        self._registry, self._chosen, self._tls, self._only = registry, chosen, tls, only
        self._jobs: dict[str, MeasuredJob] = {}
        self._failed: set[str] = set()
        self._answer = b""
        self._answered_s = float("-inf")

    async def follow(self) -> None:
        """Follow jobs as they come and go, until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self.close()

    async def look(self) -> None:
        """Begin to follow new jobs, and end following those whose agents ended KEPT_S ago."""
        now_s = time.monotonic()
        for key, folder in (await asyncio.to_thread(self._folders)).items():
            if key not in self._jobs and len(self._jobs) < JOBS_MAX and key not in self._failed:
                self._jobs[key] = MeasuredJob(key, folder, self._registry.running, self._tls)
            if key in self._jobs:
                self._jobs[key].seen_s = now_s
        for key, job in [*self._jobs.items()]:
            failed = _failure_of(job)
            if failed is not None:
                _log.error("job %s is served no more: %s", key, failed)
                self._failed.add(key)
            if failed is not None or now_s - job.seen_s > KEPT_S:
                del self._jobs[key]
                await job.close()

    async def ready(self) -> None:
        """Wait until the logs of all jobs were read."""
        await asyncio.gather(*(job.ready() for job in self._jobs.values()))

    async def close(self) -> None:
        """Stop following all jobs."""
        for job in self._jobs.values():
            await job.close()

    def server(self, host: str, port: int) -> AnswerServer:
        """Return the server of the metrics; `start` makes it listen."""
        return AnswerServer(self.answer, port, host)

    def answer(self, method: str, path: str) -> HttpAnswer:
        """Return the answer to a request."""
        if method not in ("GET", "HEAD"):
            return HttpAnswer(405 if method else 400, b"GET /metrics\n")
        if path != "/metrics":
            return HttpAnswer(404, b"the metrics are at /metrics\n")
        if time.monotonic() - self._answered_s > ANSWER_S:
            self._answer = generate_latest(self)
            self._answered_s = time.monotonic()
        return HttpAnswer(200, self._answer, CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all jobs, as prometheus_client's registries do."""
        ready = {key: job for key, job in sorted(self._jobs.items()) if job.is_ready}
        return families({key: job.measured() for key, job in ready.items()})

    def _folders(self) -> dict[str, Path]:
        """Return the log folders of the jobs that have an agent here, by the jobs' names."""
        if self._only and self._chosen is not None:
            return {self._only: self._chosen} if self._chosen.is_dir() else {}
        found: dict[str, Path] = {}
        for entry in self._registry.running():
            if entry.log_dir and (folder := Path(entry.log_dir) / safe_name(entry.job)).is_dir():
                found[entry.job] = folder
        if self._chosen is not None and self._chosen not in map(Path.resolve, found.values()):
            found[self._chosen.name] = self._chosen
        return found


def _failure_of(job: MeasuredJob) -> Exception | None:
    """Return what ended the following of a job, such as a log that may not be read."""
    try:
        job.check()
    except Exception as error:
        return error
    return None
