"""One operator's work while it has the lease: informers fill the view, workers reconcile the jobs.

Owns the tasks, and the handling of a job whose reconciliation failed. A session reads all objects
after it got the lease, so it sees every write of earlier operators. It fails with LeaseLostError if
it has to write without the lease. A bug in a decision stops only that job, which is logged and
retried.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from elastane.errors import LeaseLostError
from elastane.kubernetes.client import Api, ApiError, ApiForbiddenError, Resource
from elastane.kubernetes.client.resource import EVERYTHING
from elastane.kubernetes.model import Decision, ElasticJob, JobTemplate, Observed, ReportedEvent
from elastane.kubernetes.operator.bounds import RESYNC_S, WORKERS
from elastane.kubernetes.operator.executor import Executor, StaleError, StatusRefusedError
from elastane.kubernetes.operator.informer import Informer, WatchConnection, Watched
from elastane.kubernetes.operator.metrics import Metrics
from elastane.kubernetes.operator.queue import KeyedQueue
from elastane.kubernetes.operator.reporting import EventPublisher, EventSubject
from elastane.kubernetes.operator.view import (
    BY_KIND,
    JOBS,
    OURS,
    POD_GROUPS,
    RESOURCES,
    TEMPLATES,
    ClusterView,
    type_of,
)
from elastane.kubernetes.reconcile import template_to_read

_log = logging.getLogger(__name__)
_NODES = BY_KIND["Node"]
Decide = Callable[[Observed, float], Decision]


class OperatorSession:
    """The work from the first lists to the last write. `may_act` says whether the lease is held.

    `decide` is `reconcile`: from the observed objects and the time since 1970 to a decision.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        metrics: Metrics,
        recorder: EventPublisher,
        may_act: Callable[[], bool],
        decide: Decide,
    ) -> None:
        self.queue = KeyedQueue()
        self.view = ClusterView(self.queue.add, self.queue.add_in)
        self._api = api
        self._decide = decide
        self._metrics = metrics
        self._recorder = recorder
        self._executor = Executor(api, self.view, metrics, may_act)
        connection = WatchConnection()
        self._informers = [
            self._informer(api, namespace, resource, connection) for resource in RESOURCES
        ]
        self._stopping = False
        self.synced = asyncio.Event()

    def _informer(
        self, api: Api, namespace: str, resource: Resource, connection: WatchConnection
    ) -> Informer[Any]:
        kind = resource.kind
        watched: Watched[Any] = Watched(
            resource,
            namespace,
            type_of(kind),
            EVERYTHING if resource in (JOBS, _NODES) else OURS,
            # An operator of one namespace may have no right to nodes; it notices lost nodes later.
            # Pod groups are of schedulers, which may be missing.
            optional=resource is _NODES or resource in POD_GROUPS,
        )
        return Informer(
            api,
            watched,
            self.view.cache_of(kind),
            connection,
            lambda name: self._metrics.count(name, kind=kind),
        )

    @property
    def faults(self) -> list[str]:
        """The faults that keep this operator from reading the cluster, a line each."""
        return [one.fault for one in self._informers if one.fault and not one.optional]

    async def run(self) -> None:
        """Work until cancelled; raises what ends an operator."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run(), name=f"informer {informer.resource.kind}")
            for informer in self._informers:
                await informer.ready.wait()
            self.synced.set()
            _log.info("%d jobs and %d pods seen", len(self.view.jobs), len(self.view.pods))
            for number in range(WORKERS):
                group.create_task(self._work(), name=f"worker {number}")
            group.create_task(self._resync(), name="resync")

    async def finish(self, timeout_s: float) -> None:
        """Start no further decision, and wait for the current ones, `timeout_s` at most."""
        self._stopping = True
        await self.queue.wait_returned(timeout_s)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            if self._stopping:
                self.queue.done(key)
                return
            begun_s = time.monotonic()
            try:
                await self._keep(key)
            finally:
                self.queue.done(key)
                self._metrics.observe("elastane_reconcile_seconds", time.monotonic() - begun_s)

    async def _keep(self, key: str) -> None:
        """Decide on one job and carry it out; after a failure the job is retried."""
        job = self.view.jobs.get(key)
        if job is None:
            self.view.forget(key)
            self.queue.forget(key)
            return
        try:
            seen = await self._observe(key)
            job = seen.job
            decision = self._decide(seen, time.time())
            await self._executor.carry_out(key, job, decision)
        except StaleError as stale:
            self._count("stale")
            _log.info("job %s: %s: deciding again", key, stale)
            self.queue.retry(key)
        except (ApiError, StatusRefusedError) as error:
            self._failed(key, job, error)
        except LeaseLostError:
            raise
        except Exception:
            # A bug of elastane must stop only this job.
            self._count("bug")
            wait_s = self.queue.retry(key)
            _log.exception("job %s: cannot be decided upon, tried again in %.1f s", key, wait_s)
        else:
            self._count("done")
            self.queue.succeeded(key)
            for event in decision.events:
                self._recorder.record(_about(job), event)
            if decision.again_in_s is not None:
                self.queue.add_in(key, decision.again_in_s)

    async def _observe(self, key: str) -> Observed:
        """Return the objects of a job; what is not cached, or in doubt, is read."""
        await self.view.nodes.look(self._api, self.view.nodes_in_doubt(key))
        seen = self.view.observed(key)
        if seen is None:
            raise StaleError("the job was deleted")
        if name := template_to_read(seen.job):
            space = seen.job.metadata.namespace
            template = await self._api.find(TEMPLATES, space, name, JobTemplate)
            return msgspec.structs.replace(seen, template=template)
        return seen

    def _give_up(self, key: str, job: ElasticJob, error: ApiError) -> None:
        """Leave a job alone until it changes, or the next resync."""
        self._count("refused")
        self.queue.succeeded(key)
        _log.warning("job %s: %s", key, error)
        event = ReportedEvent(type="Warning", reason="StatusRefused", message=error.message)
        self._recorder.record(_about(job), event)

    def _failed(self, key: str, job: ElasticJob, error: ApiError | StatusRefusedError) -> None:
        if isinstance(error, StatusRefusedError):
            self._give_up(key, job, error.error)
            return
        self._count("failed")
        wait_s = self.queue.retry(key, error.retry_after_s or 0.0)
        if isinstance(error, ApiForbiddenError):
            if error.namespace_ends:  # and the job with it
                _log.info("job %s: its namespace is being deleted: nothing can be created", key)
                return
            event = ReportedEvent(type="Warning", reason="Forbidden", message=error.message)
            self._recorder.record(_about(job), event)
        _log.warning("job %s: %s (again in %.1f s)", key, error, wait_s)

    def _count(self, result: str) -> None:
        self._metrics.count("elastane_reconciles_total", result=result)

    async def _resync(self) -> None:
        """Queue every job once per RESYNC_S, spread evenly, in case an event was missed."""
        while True:
            keys = self.view.keys()
            for key in keys:
                self.queue.add_in(key, random.uniform(0.0, RESYNC_S))
            await asyncio.sleep(RESYNC_S)


def _about(job: ElasticJob) -> EventSubject:
    meta = job.metadata
    return EventSubject(JOBS.api_version, JOBS.kind, meta.namespace, meta.name, meta.uid)
