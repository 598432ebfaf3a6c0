"""A coordinator inside this agent: the rules, their server, and the bridge to an operator.

Owns the composition of one coordinator at a time; `leadership` decides when it runs. A fault of the
operator bridge is logged and does not end the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from elastane.coordinator import Coordinator
from elastane.coordinator.rules import NO_PREDECESSOR, Rendezvous, Takeover
from elastane.errors import RendezvousRefusedError
from elastane.kubernetes.store.settings import JOB_VARIABLE, POD_VARIABLE
from elastane.process.rpc import Access, insist_on_room
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Fence, JobRecord, JobSpec, Outcome
from elastane.stores import JobKeys

if TYPE_CHECKING:
    from elastane.kubernetes.bridge import OperatorBridge

_log = logging.getLogger("elastane.coordinator")
Save = Callable[[JobRecord], Awaitable[None]]


async def keep_no_record(record: JobRecord) -> None:
    """Keep no record: the job has no store, and its agents report earlier worlds."""


def operator_bridge_of(keys: JobKeys | None, environ: Mapping[str, str]) -> OperatorBridge | None:
    """Return the bridge to the operator of an ElasticJob; None if this is no pod of one."""
    job, pod = environ.get(JOB_VARIABLE, ""), environ.get(POD_VARIABLE, "")
    if not job or not pod or keys is None:
        return None
    from elastane.kubernetes.bridge import OperatorBridge, OperatorMailbox
    from elastane.kubernetes.store.store import KubernetesStore

    if not isinstance(keys.store, KubernetesStore):
        return None
    return OperatorBridge(OperatorMailbox(keys.store, job))


class CoordinatorHost:
    """Runs coordinators for this agent's job, at most one at a time."""

    def __init__(
        self,
        spec: JobSpec,
        access: Access,
        tell: Callable[[LogEvent], None],
        attending: OperatorBridge | None = None,
    ) -> None:
        """`attending` is the bridge to the operator, if this job is an ElasticJob."""
        self.spec = spec
        self._attending = attending
        self._access = access
        self._tell = tell
        self.coordinator: Coordinator | None = None
        self._machine: Rendezvous | None = None

    def shortage(self) -> tuple[Fence | None, float]:
        """Return the fence of the last world, and for how long too few nodes have been left."""
        if self._machine is None:
            return None, 0.0
        return self._machine.last_fence, self._machine.short_of_nodes_s

    def check(self, record: JobRecord | None) -> None:
        """Raise if this agent's job differs from the recorded one: it must not decide for that."""
        if record is None:
            return
        ours = self.spec.sized_as(record.spec) if record.resized else self.spec
        if record.spec == ours:
            return
        raise RendezvousRefusedError(
            f"job {self.spec.job!r} is on record as {record.spec}, and this agent was started"
            f" for {self.spec}",
            slug="config-mismatch",
            expected="the same --nnodes, --max-restarts and --rdzv-conf on every node",
            next_step="start every agent of a job with the same command line",
        )

    async def serve(
        self,
        listener: socket.socket,
        takeover: Takeover = NO_PREDECESSOR,
        save: Save = keep_no_record,
    ) -> Outcome | None:
        """Serve until the job has ended (its outcome) or leadership was lost (None).

        Raises ConfigurationError if this process may not open the connections of the smallest
        world.
        """
        insist_on_room(self.spec.min_nodes)
        machine = Rendezvous(self.spec, time.monotonic(), takeover)
        coordinator = Coordinator(
            machine,
            listener,
            access=self._access,
            save=save,
            tell=self._tell,
        )
        port = listener.getsockname()[1]
        self.coordinator, self._machine = coordinator, machine
        self._log_event(
            EventKind.COORDINATOR_STARTED, f"on port {port}, in phase {machine.phase.value}"
        )
        try:
            async with self._operator_bridge(coordinator, machine):
                return await coordinator.run()
        finally:
            self.coordinator = self._machine = None
            self._log_event(EventKind.COORDINATOR_STOPPED, f"in phase {machine.phase.value}")

    @contextlib.asynccontextmanager
    async def _operator_bridge(
        self, coordinator: Coordinator, machine: Rendezvous
    ) -> AsyncIterator[None]:
        """Connect to the job's operator before any agent is admitted, and disconnect afterwards."""
        if self._attending is None:
            yield
            return
        begun = asyncio.Event()
        task = asyncio.create_task(self._attending.run(coordinator, machine, begun))
        try:
            await begun.wait()
            yield
        finally:
            task.cancel()
            [result] = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, Exception):
                _log.error("the operator was not served any more: %r", result)

    def _log_event(self, kind: EventKind, reason: str) -> None:
        self._tell(LogEvent(kind=kind, reason=reason))
