"""What an agent has of its own on its machine: a name, a warden, a zygote, an event log, a port.

Owns their order: the warden before anything that it is to end, the zygote at once, since its
imports take longest. On the way out, nothing that was started here is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastane.agent.offers import OfferedPort
from elastane.agent.snapshot_server import Keeping
from elastane.agent.timer_watch import TimerWatch
from elastane.observe import logging as say
from elastane.observe.events import EventLog
from elastane.observe.handlers import Hear, event_handler, hear_nothing
from elastane.observe.records import Teller
from elastane.options.config import AgentConfig
from elastane.process.execspawn import ExecSpawner
from elastane.process.files import JobRegistry, NodeSlot, runtime_folder, safe_name
from elastane.process.health import HealthServer
from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import LEASH_VARIABLE, OrphanReaper
from elastane.process.process import Spawner
from elastane.process.strays import kill_strays
from elastane.process.worker_environment import without_secrets
from elastane.process.zygote.client import ZygoteSpawner
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.log_events import EventKind, Note

if TYPE_CHECKING:
    from elastane.snapshots.events import News

_log = logging.getLogger("elastane.options")
# Between two starts of the warden, so that one that cannot live costs little.
_WARDEN_PAUSE_S = 0.5


@dataclass
class NodeServices:
    """What an agent has of its own on this machine."""

    config: AgentConfig
    id: str
    leash: str
    events: EventLog
    warden: OrphanReaper
    spawner: Spawner
    port: OfferedPort
    keeping: Keeping
    timers: TimerWatch | None = None
    hear: Hear = hear_nothing

    def tell(self, note: Note) -> None:
        """Log a note of this agent's."""
        self._tell(note, "agent")

    def tell_of_keeper(self, news: News) -> None:
        """Log what the keeper of snapshots tells."""
        from elastane.agent.snapshot_events import note_of

        self.tell(note_of(news, self.id))

    def tell_keeper_lost(self, reason: str) -> None:
        """Log that the keeper of snapshots ended before this agent."""
        self.events.tell(Note(kind=EventKind.KEEPER_LOST, reason=reason, node_id=self.id), "agent")

    def tell_as_coordinator(self, note: Note) -> None:
        """Log a note of the coordinator's, which runs here."""
        self._tell(note, "coordinator")

    def _tell(self, note: Note, source: str) -> None:
        say.tell(note)
        self.events.tell(note, source)
        self.hear(note, source)


def place(
    config: AgentConfig, host: str, stack: contextlib.ExitStack
) -> tuple[JobRegistry | None, str]:
    """Return where this machine's jobs are noted, and this agent's node id.

    Where nothing can be written (a container with a read-only disk), the job runs all the same.
    """
    wished = config.node.node_id
    try:
        folder = runtime_folder(config.environment)
        node_id = (
            wished or stack.enter_context(NodeSlot.acquire(folder, config.spec.job, host)).node_id
        )
    except OSError as error:
        _log.warning(
            "elastane status will not find this job: %s; next: set XDG_RUNTIME_DIR or TMPDIR to a"
            " folder that can be written [runtime-folder]",
            error,
        )
        return None, wished or f"{safe_name(host)}.{secrets.token_hex(2)}"
    return JobRegistry(folder), node_id


@contextlib.asynccontextmanager
async def node_of(config: AgentConfig, node_id: str, host: str) -> AsyncIterator[NodeServices]:
    """Set up what the agent has on this machine, and take it down again."""
    leash = uuid.uuid4().hex
    become_subreaper()
    keeping = Keeping(config.environment)
    keeping.open()
    warden = OrphanReaper(leash, keeping.path)
    await warden.start()
    events = EventLog(config.logs.base_dir, config.spec.job, node_id, host)
    spawner = _spawner(config, leash, events, node_id)
    port = OfferedPort(listening=isinstance(spawner, ZygoteSpawner), host=config.reach)
    watched = config.supervision
    node = NodeServices(config, node_id, leash, events, warden, spawner, port, keeping)
    keeping.report(node.tell_of_keeper, node.tell_keeper_lost)
    node.hear = event_handler(
        watched.event_handler, Teller(job=config.spec.job, node=node_id, host=host, pid=os.getpid())
    )
    node.timers = TimerWatch(watched.timer_file) if watched.watches_timers else None
    keeper = asyncio.create_task(_keep(warden))
    keeping.start()
    await spawner.start()
    health = await _answer_health(watched.health_port)
    try:
        if node.timers is not None:
            node.timers.open()
        yield node
    finally:
        if health is not None:
            health.close()
        if node.timers is not None:
            node.timers.close()
        await spawner.close()
        port.close()
        await kill_strays()
        await keeping.close()
        keeper.cancel()
        await warden.close()
        events.close()


async def _answer_health(port: int | None) -> HealthServer | None:
    """Answer health checks; a port that is taken costs the answers, not the job."""
    if port is None:
        return None
    server = HealthServer(time.time, port)
    try:
        await server.start()
    except OSError as error:
        _log.warning("no answers to health checks on port %d: %s", port, error.strerror or error)
        return None
    return server


async def _keep(warden: OrphanReaper) -> None:
    """Start the warden again when it was killed: only it can end what outlives this agent."""
    while True:
        code = await warden.wait()
        _log.warning("the warden ended (%s); another one takes its place", exit_text(code))
        try:
            await warden.start()
        except OSError as error:
            _log.error("no other warden: %s; a killed agent may leave processes behind", error)
            return
        await asyncio.sleep(_WARDEN_PAUSE_S)


def _spawner(config: AgentConfig, leash: str, events: EventLog, node_id: str) -> Spawner:
    command = config.command
    if not command.zygote:
        return ExecSpawner(command.python)
    kinds = {
        "warm": EventKind.ZYGOTE_WARM,
        "died": EventKind.ZYGOTE_DIED,
        "problem": EventKind.ZYGOTE_PROBLEM,
        "fallback": EventKind.ZYGOTE_FALLBACK,
    }

    def tell(kind: str, reason: str) -> None:
        note = Note(kind=kinds[kind], reason=reason, node_id=node_id)
        say.tell(note)
        events.tell(note, "agent")

    env = {**without_secrets(config.environment), LEASH_VARIABLE: leash}
    if config.node.local_world_size > 1:
        # As each worker will have it: OpenMP reads it when torch is imported.
        env.setdefault("OMP_NUM_THREADS", "1")
    return ZygoteSpawner(command.preload, env, command.python, tell)
