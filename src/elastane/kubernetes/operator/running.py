"""Runs an operator: takes the lease, works while it holds it, and ends.

An operator ends in three ways. On SIGTERM it finishes the current decisions and releases the lease,
so that the next operator acts immediately. When it loses the lease, it stops at once and ends with
LeaseLostError; its Deployment starts it again. When it is killed, nothing is lost: the next
operator takes over once the lease has expired. A failure to read or write the lease is logged once
and retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from elastane.errors import ConfigurationError, ElastaneError, LeaseLostError
from elastane.kubernetes.client import Api, ClusterAccess
from elastane.kubernetes.operator.bounds import (
    END_S,
    EVENTS_FLUSH_S,
    LEASE_HOLD_S,
    LEASE_LOOK_S,
    LEASE_RENEW_S,
    LEASE_REQUEST_S,
    LEASE_S,
    WRITES_IN_FLIGHT_MAX,
)
from elastane.kubernetes.operator.probes import Probes, make_metrics
from elastane.kubernetes.operator.reporting import EventPublisher
from elastane.kubernetes.operator.session import Decide, OperatorSession
from elastane.kubernetes.reconcile import reconcile
from elastane.kubernetes.store.lease import KubernetesLease, LeaseCandidacy, LeasePlace
from elastane.observe.logging import ConsoleHandler, one_line, setup
from elastane.process import environment
from elastane.process.health import AnswerServer
from elastane.process.streams.console import process_console
from elastane.stores import boot_clock

_log = logging.getLogger(__name__)
# Connections besides those of the writes: one watch for each kind, events, and lists.
_CONNECTIONS_MAX = WRITES_IN_FLIGHT_MAX + 16
GC_OBJECTS = 50_000
LEASE_NAME = "elastane-operator"


def identity() -> str:
    """Return a name by which a person finds this operator's pod."""
    host = environment.get("ELASTANE_POD_NAME") or environment.get("HOSTNAME") or "operator"
    return host[:100]


@dataclass(frozen=True)
class OperatorSettings:
    """The settings of an operator: which namespace it watches ("": all), and where its lease is."""

    namespace: str = ""
    lease_namespace: str = "default"
    lease_name: str = LEASE_NAME
    identity: str = field(default_factory=identity)
    metrics_port: int | None = None
    lease_s: float = LEASE_S


class Operator:
    """One operator over one API server. `stop` ends it gracefully."""

    def __init__(
        self, access: ClusterAccess, settings: OperatorSettings, decide: Decide = reconcile
    ) -> None:
        self.settings = settings
        self._decide = decide
        self.metrics = make_metrics()
        self.session: OperatorSession | None = None
        self._stop = asyncio.Event()
        self._api = Api(access, connections_max=_CONNECTIONS_MAX)
        # Renewals have their own connections, so that they do not wait behind other requests.
        self._election_api = Api(access, connections_max=2)
        # An operator of one namespace has the right to patch its lease, and not to replace it.
        place = LeasePlace(
            self._election_api,
            settings.lease_namespace,
            lambda: {"name": settings.lease_name},
            patches=True,
        )
        self.elector = Elector(place, settings.identity, settings.lease_s)
        self.recorder = EventPublisher(
            self._api,
            settings.identity,
            lambda outcome: self.metrics.count("elastane_events_total", outcome=outcome),
        )
        self.probes = Probes(self.metrics, self.not_ready, lambda: self.session)

    def stop(self) -> None:
        """End the operator: finish the current decisions, and release the lease."""
        self._stop.set()

    def not_ready(self) -> list[str]:
        """Return why this operator could neither act nor take over, a line each."""
        if self.session is None:
            looked = boot_clock() - self.elector.looked_s < 2 * self.settings.lease_s
            return [] if looked else [self.elector.fault or "the lease was not read yet"]
        if self.session.synced.is_set():
            return []
        return self.session.faults or ["the lists are being read"]

    async def run(self) -> None:
        """Run until stopped; raises LeaseLostError if the lease is lost."""
        try:
            async with self._served():
                campaign = asyncio.create_task(self.elector.campaign(), name="campaign")
                asked_to_end = await self._until(campaign)
                if asked_to_end:
                    await self.elector.resign()
                else:
                    await self._lead()
        finally:
            await self._api.close()
            await self._election_api.close()

    async def _lead(self) -> None:
        session = OperatorSession(
            self._api,
            self.settings.namespace,
            self.metrics,
            self.recorder,
            self.elector.held,
            self._decide,
        )
        self.session = session

        async def end() -> None:
            _log.info("asked to end")
            await session.finish(END_S)
            await self.recorder.flush(EVENTS_FLUSH_S)
            await self.elector.resign()

        tasks = [
            asyncio.create_task(session.run(), name="session"),
            asyncio.create_task(self.elector.keep(), name="lease"),
            asyncio.create_task(self.recorder.run(), name="events"),
        ]
        try:
            await self._until(*tasks, end=end)
        finally:
            self.session = None

    async def _until(
        self, *tasks: asyncio.Task[None], end: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Wait until one of the tasks ends, or until `stop`: then call `end()` and return True.

        All tasks are ended before the return. The exception of a task is raised.
        """
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._stop.is_set() and end is not None:
                await end()
            return self._stop.is_set()
        except BaseExceptionGroup as group:
            # An ElastaneError is shown as its text; any other exception is a bug, with traceback.
            ours = group.subgroup(LeaseLostError) or group.subgroup(ElastaneError)
            if ours is None:
                raise
            raise _first(ours) from None
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.gather(*tasks, stop, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """Answer probes inside this context, if a port is set."""
        port = self.settings.metrics_port
        if port is None:
            yield
            return
        server = AnswerServer(self.probes.answer, port)
        try:
            await server.start()
        except OSError as error:
            raise ConfigurationError(
                f"--metrics-port {port}: {error.strerror or error}",
                slug="metrics-port",
                expected="a port that nothing else listens on",
                next_step="--metrics-port 0 takes any",
            ) from error
        _log.info("probes and metrics on port %d", server.port)
        try:
            yield
        finally:
            server.close()


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    one = group.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


async def run(access: ClusterAccess, settings: OperatorSettings) -> None:
    """Run an operator until SIGTERM or SIGINT; LeaseLostError if another took over."""
    # Caches of many small objects in no cycles: looking for cycles in them, again and again while
    # they are filled, took half of the CPU time of a start (20,000 pods, 2026-11-21).
    gc.set_threshold(GC_OBJECTS, 20, 50)
    operator = Operator(access, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, operator.stop)
    await operator.run()


_SILENT = "the API server does not answer"


class Elector:
    """Takes and keeps the lease of `place`, as `identity`."""

    def __init__(self, place: LeasePlace, identity: str, lease_s: float = LEASE_S) -> None:
        self._name = f"{place.namespace}/{place.metadata()['name']}"
        self._identity = identity
        self._pace = lease_s / LEASE_S
        margin = 1 - LEASE_HOLD_S / LEASE_S
        self._candidacy = LeaseCandidacy(place, self._name, identity.encode(), lease_s, margin)
        self._lease: KubernetesLease | None = None
        # When the lease was last read or written, and the last failure to do so, for a person.
        self.looked_s = float("-inf")
        self.fault = ""

    def held(self) -> bool:
        """Return whether this operator may act at this moment."""
        return self._lease is not None and self._lease.held()

    async def campaign(self) -> None:
        """Return once the lease is held. Cancel it to withdraw."""
        while not self.held():
            await self._try(self._take(), LEASE_REQUEST_S)
            if not self.held():
                await asyncio.sleep(LEASE_LOOK_S * self._pace)
        _log.info("lease %s is held by %s", self._name, self._identity)

    async def keep(self) -> None:
        """Renew until the lease is lost; then raise LeaseLostError, at that moment."""
        lease = self._lease
        while lease is not None and lease.held():
            await asyncio.sleep(min(LEASE_RENEW_S * self._pace, lease.remaining_s()))
            left_s = max(0.0, lease.remaining_s())
            await self._try(lease.renew(), min(left_s, LEASE_REQUEST_S))
        raise LeaseLostError(
            f"this operator no longer holds the lease {self._name}",
            slug="operator-lease-lost",
            where=f"operator {self._identity}",
            expected="an API server that grants renewals, and no other operator that takes over",
            next_step="nothing: another operator acts, and the Deployment restarts this one",
        )

    async def resign(self) -> None:
        """Release the lease, so that another operator may act at once."""
        if self._lease is not None and self._lease.held():
            await self._try(self._lease.release(), LEASE_REQUEST_S)

    async def _take(self) -> None:
        self._lease = await self._candidacy.take()

    async def _try(self, request: Awaitable[object], patience_s: float) -> None:
        """Read or write the lease; a failure is logged once."""
        try:
            async with asyncio.timeout(patience_s):
                await request
        except (ElastaneError, TimeoutError) as error:
            what = error.what if isinstance(error, ElastaneError) else _SILENT
            if what != self.fault:
                _log.warning("lease %s: %s", self._name, what)
            self.fault = what
            return
        self.fault = ""
        self.looked_s = boot_clock()


_STDERR = 2
# The default level is lower than an agent's: people read an operator's log to see what it does.
DEFAULT_LEVEL = "INFO"


def set_up_logs(*, as_json: bool) -> None:
    """Let the logger `elastane` write to stderr; UsageError where LOGLEVEL is no level."""
    logger = setup("operator", environment.get("LOGLEVEL") or DEFAULT_LEVEL)
    if as_json:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(JsonHandler(process_console(_STDERR), "operator"))


class JsonHandler(ConsoleHandler):
    """Writes records as JSON: time, level, logger, message."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as one line."""
        try:
            text = one_line(record.getMessage())
            if record.exc_info:
                text += " | " + one_line(logging.Formatter().formatException(record.exc_info))
        except (TypeError, ValueError):  # a format string that does not fit its arguments
            self.handleError(record)
            return
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        self.console.put(json.dumps(line).encode() + b"\n")
