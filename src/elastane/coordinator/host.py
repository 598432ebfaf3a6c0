"""A coordinator inside this agent: the pure rendezvous, its server, and its ways out.

Owns the composition of one coordinator. It does not know how the seat was won.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.coordinator import Coordinator
from elastane.coordinator.rules import Rendezvous
from elastane.errors import RendezvousRefusedError
from elastane.kubernetes.store.settings import JOB_VARIABLE, POD_VARIABLE
from elastane.process.rpc import Access, insist_on_room
from elastane.protocol.log_events import EventKind, Note
from elastane.protocol.model import JobRecord, JobSpec, Outcome
from elastane.stores.jobs import JobKeys

if TYPE_CHECKING:
    from elastane.kubernetes.bridge.bridge import Attending

_log = logging.getLogger("elastane.hosting")
Save = Callable[[JobRecord], Awaitable[None]]


async def save_nowhere(record: JobRecord) -> None:
    """Keep no record: the job has no store, and its agents hold what is known."""


def attending_of(keys: JobKeys | None, environ: Mapping[str, str]) -> Attending | None:
    """Return what serves the operator of an ElasticJob, None where this is no pod of one."""
    job, pod = environ.get(JOB_VARIABLE, ""), environ.get(POD_VARIABLE, "")
    if not job or not pod or keys is None:
        return None
    from elastane.kubernetes.bridge.bridge import Attending
    from elastane.kubernetes.bridge.mailbox import Correspondence
    from elastane.kubernetes.store.store import KubernetesStore

    if not isinstance(keys.store, KubernetesStore):
        return None
    return Attending(Correspondence(keys.store, job))


@dataclass(frozen=True)
class Takeover:
    """What a coordinator finds where it begins: the record, and whose coordinator ended."""

    record: JobRecord | None = None
    previous_holder: str = ""
    store_backed: bool = False


class Hosting:
    """Makes coordinators for this agent's job; at most one runs at a time."""

    def __init__(
        self,
        spec: JobSpec,
        access: Access,
        tell: Callable[[Note], None],
        attending: Attending | None = None,
    ) -> None:
        """`attending` serves the operator of the ElasticJob that this is, if it is one."""
        self.spec = spec
        self._attending = attending
        self._access = access
        self._tell = tell
        self.coordinator: Coordinator | None = None
        self._machine: Rendezvous | None = None

    def short_of_nodes_s(self) -> float:
        """Return for how long the coordinator has had too few nodes after a loss of some."""
        return self._machine.short_of_nodes_s if self._machine is not None else 0.0

    def check(self, record: JobRecord | None) -> None:
        """Raise where this agent's job is not the recorded one: it must not decide for it."""
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
        self, listener: socket.socket, takeover: Takeover, save: Save = save_nowhere
    ) -> Outcome | None:
        """Serve until the job has ended (its outcome) or the seat was lost (None).

        ConfigurationError where this process may not hold the connections of the smallest world.
        """
        insist_on_room(self.spec.min_nodes)
        machine = Rendezvous(
            self.spec,
            time.monotonic(),
            takeover.record,
            store_backed=takeover.store_backed,
            previous_holder=takeover.previous_holder,
        )
        coordinator = Coordinator(
            machine,
            listener,
            access=self._access,
            save=save,
            tell=self._tell,
        )
        port = listener.getsockname()[1]
        self.coordinator, self._machine = coordinator, machine
        self._say(EventKind.COORDINATOR_STARTED, f"on port {port}, in phase {machine.phase.value}")
        try:
            async with self._attended(coordinator, machine):
                return await coordinator.run()
        finally:
            self.coordinator = self._machine = None
            self._say(EventKind.COORDINATOR_STOPPED, f"in phase {machine.phase.value}")

    @contextlib.asynccontextmanager
    async def _attended(self, coordinator: Coordinator, machine: Rendezvous) -> AsyncIterator[None]:
        """Have the job's operator heard, before anybody is let in, and told."""
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

    def _say(self, kind: EventKind, reason: str) -> None:
        self._tell(Note(kind=kind, reason=reason))
