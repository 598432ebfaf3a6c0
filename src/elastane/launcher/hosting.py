"""A coordinator inside this agent: the pure rendezvous, its server, and its ways out.

Owns the composition of one coordinator. It does not know how the seat was won.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from elastane.coordinator import Coordinator
from elastane.core.model import JobSpec, Outcome, Record
from elastane.core.notes import EventKind, Note
from elastane.core.rendezvous import Rendezvous
from elastane.errors import RendezvousRefusedError
from elastane.runtime.rpc import Access

Save = Callable[[Record], Awaitable[None]]


async def save_nowhere(record: Record) -> None:
    """Keep no record: the job has no store, and its agents hold what is known."""


@dataclass(frozen=True)
class Takeover:
    """What a coordinator finds where it begins: the record, and whose coordinator ended."""

    record: Record | None = None
    previous_holder: str = ""
    store_backed: bool = False


class Hosting:
    """Makes coordinators for this agent's job; at most one runs at a time."""

    def __init__(self, spec: JobSpec, access: Access, tell: Callable[[Note], None]) -> None:
        self.spec = spec
        self._access = access
        self._tell = tell
        self.coordinator: Coordinator | None = None
        self._machine: Rendezvous | None = None

    def short_of_nodes_s(self) -> float:
        """Return for how long the coordinator has had too few nodes after a loss of some."""
        return self._machine.short_of_nodes_s if self._machine is not None else 0.0

    def check(self, record: Record | None) -> None:
        """Raise where this agent's job is not the recorded one: it must not decide for it."""
        if record is None or record.spec == self.spec:
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
        """Serve until the job has ended (its outcome) or the seat was lost (None)."""
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
            return await coordinator.run()
        finally:
            self.coordinator = self._machine = None
            self._say(EventKind.COORDINATOR_STOPPED, f"in phase {machine.phase.value}")

    def _say(self, kind: EventKind, reason: str) -> None:
        self._tell(Note(kind=kind, reason=reason))
