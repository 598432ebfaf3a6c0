"""One operator's work while it has the lease: informers fill the view, workers keep the jobs.

Owns the tasks and what becomes of a job whose reconciliation failed. Everything that it knows it
has read since it got the lease: what an operator before it did is in there. How it fails:
LeaseLostError where a write was to be done without the lease; a bug in a decision costs that job
alone, which is tried again, and told.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from elastane.errors import LeaseLostError
from elastane.kubernetes.client import Api, ApiError, ApiForbiddenError, Resource
from elastane.kubernetes.model import Decision, ElasticJob, Observed, ReportedEvent
from elastane.kubernetes.operator.bounds import RESYNC_S, WORKERS
from elastane.kubernetes.operator.executor import Doer, StaleError, StatusRefusedError
from elastane.kubernetes.operator.informer import Informer, WatchStream
from elastane.kubernetes.operator.kinds import BY_KIND, JOBS, OURS, RESOURCES, type_of
from elastane.kubernetes.operator.metrics import Metrics
from elastane.kubernetes.operator.queue import KeyedQueue
from elastane.kubernetes.operator.reporting import EventSubject, Recorder
from elastane.kubernetes.operator.view import ClusterView

_log = logging.getLogger(__name__)
_NODES = BY_KIND["Node"]
Decide = Callable[[Observed, float], Decision]


class OperatorSession:
    """From the lists to the last write. `may_act` says whether the lease is held.

    `decide` is `reconcile`: what was seen and the time since 1970, and what is to be done.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        metrics: Metrics,
        recorder: Recorder,
        may_act: Callable[[], bool],
        decide: Decide,
    ) -> None:
        self.queue = KeyedQueue()
        self.view = ClusterView(self.queue.add, self.queue.add_in)
        self._api = api
        self._decide = decide
        self._metrics = metrics
        self._recorder = recorder
        self._doer = Doer(api, self.view, metrics, may_act)
        self._line = WatchStream()
        self._informers = [self._informer(api, namespace, resource) for resource in RESOURCES]
        self._stopping = False
        self.synced = asyncio.Event()

    def _informer(self, api: Api, namespace: str, resource: Resource) -> Informer[Any]:
        kind = resource.kind
        cache = self.view.cache_of(kind)
        made: Informer[Any] = Informer(api, resource, namespace, type_of(kind), cache)
        made.line = self._line
        made.count = lambda name: self._metrics.count(name, kind=kind)
        if resource not in (JOBS, _NODES):
            made.selector = OURS
        # An operator of one namespace may have no right to nodes; it then hears of them late.
        made.optional = resource is _NODES
        return made

    @property
    def troubles(self) -> list[str]:
        """What stands against seeing the cluster, a line each; empty while all is well."""
        return [one.trouble for one in self._informers if one.trouble and not one.optional]

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
        """Begin nothing new, and wait for what is under way, no longer than `timeout_s`."""
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
        """Decide on one job and do it; whatever goes wrong, it is looked at again."""
        job = self.view.jobs.get(key)
        if job is None:
            self.view.forget(key)
            self.queue.forget(key)
            return
        try:
            await self.view.nodes.look(self._api, self.view.nodes_in_doubt(key))
            seen = self.view.observed(key)
            if seen is None:
                raise StaleError("it went away")
            job = seen.job
            decision = self._decide(seen, time.time())
            await self._doer.carry_out(key, job, decision)
        except StaleError as stale:
            self._count("stale")
            _log.info("job %s: %s: decided anew", key, stale)
            self.queue.retry(key)
        except (ApiError, StatusRefusedError) as error:
            self._failed(key, job, error)
        except LeaseLostError:
            raise
        except Exception:
            # Ours to mend: this job stands still meanwhile, the others must not.
            self._count("bug")
            wait_s = self.queue.retry(key)
            _log.exception("job %s: cannot be decided upon, tried again in %.1f s", key, wait_s)
        else:
            self._count("done")
            self.queue.succeeded(key)
            for told in decision.events:
                self._recorder.tell(_about(job), told)
            if decision.again_in_s is not None:
                self.queue.add_in(key, decision.again_in_s)

    def _give_up(self, key: str, job: ElasticJob, error: ApiError) -> None:
        """Leave a job alone until it changes, or its turn comes with all others'."""
        self._count("refused")
        self.queue.succeeded(key)
        _log.warning("job %s: %s", key, error)
        told = ReportedEvent(type="Warning", reason="StatusRefused", message=error.message)
        self._recorder.tell(_about(job), told)

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
            told = ReportedEvent(type="Warning", reason="Forbidden", message=error.message)
            self._recorder.tell(_about(job), told)
        _log.warning("job %s: %s (again in %.1f s)", key, error, wait_s)

    def _count(self, result: str) -> None:
        self._metrics.count("elastane_reconciles_total", result=result)

    async def _resync(self) -> None:
        """Look at every job now and then, whatever was missed, spread over the time."""
        while True:
            keys = self.view.keys()
            for key in keys:
                self.queue.add_in(key, random.uniform(0.0, RESYNC_S))
            await asyncio.sleep(RESYNC_S)


def _about(job: ElasticJob) -> EventSubject:
    meta = job.metadata
    return EventSubject(JOBS.api_version, JOBS.kind, meta.namespace, meta.name, meta.uid)
