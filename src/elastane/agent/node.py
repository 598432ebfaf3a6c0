"""The services of one agent on its machine: name, orphan reaper, zygote, event log and port.

Owns the order of their start: the orphan reaper starts before every process that it may have to
end. The zygote starts right after it, since its imports take longest. On the way out, nothing that
was started here is left.
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

from elastane.agent.process_group_store import OfferedPort
from elastane.agent.snapshot_server import SnapshotServerHandle
from elastane.agent.timer_watch import TimerWatch
from elastane.observe import logging as console
from elastane.observe.events import EventLog, EventOrigin
from elastane.observe.logging import EventHandler, discard, event_handler
from elastane.options.config import AgentConfig
from elastane.process.execspawn import ExecSpawner
from elastane.process.files import JobRegistry, NodeSlot, runtime_folder, safe_name
from elastane.process.health import HealthServer
from elastane.process.kernel import become_subreaper
from elastane.process.orphan_reaper import MARK_VARIABLE, OrphanReaper
from elastane.process.process import Spawner, kill_strays
from elastane.process.worker_environment import without_secrets
from elastane.process.zygote.client import ZygoteSpawner
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.log_events import EventKind, LogEvent

if TYPE_CHECKING:
    from elastane.snapshots.messages import SnapshotEvent

_log = logging.getLogger("elastane.options")
# Pause between two starts of the orphan reaper, so that one that always dies costs little.
_REAPER_PAUSE_S = 0.5


@dataclass(frozen=True)
class NodeLog:
    """Where the events of one agent, its coordinator and its snapshot server are logged."""

    node_id: str
    events: EventLog
    handle_event: EventHandler = discard

    def write(self, event: LogEvent) -> None:
        """Log an event of this agent."""
        self._write_from(event, "agent")

    def write_as_coordinator(self, event: LogEvent) -> None:
        """Log an event of the coordinator, which runs in this agent."""
        self._write_from(event, "coordinator")

    def write_snapshot_event(self, event: SnapshotEvent) -> None:
        """Log what the snapshot server reports."""
        from elastane.agent.snapshot_server import snapshot_event

        self.write(snapshot_event(event, self.node_id))

    def write_snapshot_server_lost(self, reason: str) -> None:
        """Log that the snapshot server ended before this agent."""
        event = LogEvent(kind=EventKind.SNAPSHOT_SERVER_LOST, reason=reason, node_id=self.node_id)
        self.events.log(event, "agent")

    def _write_from(self, event: LogEvent, source: str) -> None:
        console.log_event(event)
        self.events.log(event, source)
        self.handle_event(event, source)


@dataclass(frozen=True)
class NodeServices:
    """The services of one agent on its machine."""

    config: AgentConfig
    id: str
    process_mark: str
    log: NodeLog
    reaper: OrphanReaper
    spawner: Spawner
    port: OfferedPort
    snapshot_server: SnapshotServerHandle
    timers: TimerWatch | None = None


def register_node(
    config: AgentConfig, host: str, stack: contextlib.ExitStack
) -> tuple[JobRegistry | None, str]:
    """Return the registry of this machine's jobs, and this agent's node id.

    Where nothing can be written (a container with a read-only disk), the job runs without a
    registry.
    """
    requested = config.node.node_id
    try:
        folder = runtime_folder(config.environment)
        node_id = (
            requested
            or stack.enter_context(NodeSlot.acquire(folder, config.spec.job, host)).node_id
        )
    except OSError as error:
        _log.warning(
            "elastane status will not find this job: %s; next: set XDG_RUNTIME_DIR or TMPDIR to a"
            " folder that can be written [runtime-folder]",
            error,
        )
        return None, requested or f"{safe_name(host)}.{secrets.token_hex(2)}"
    return JobRegistry(folder), node_id


@contextlib.asynccontextmanager
async def node_services(
    config: AgentConfig, node_id: str, host: str
) -> AsyncIterator[NodeServices]:
    """Start the services of this agent on its machine, and stop them at the end."""
    process_mark = uuid.uuid4().hex
    become_subreaper()
    supervision = config.supervision
    events = EventLog(config.logs.base_dir, config.spec.job, node_id, host)
    origin = EventOrigin(job=config.spec.job, node=node_id, host=host, pid=os.getpid())
    log = NodeLog(node_id, events, event_handler(supervision.event_handler, origin))
    snapshot_server = SnapshotServerHandle(
        config.environment, log.write_snapshot_event, log.write_snapshot_server_lost
    )
    snapshot_server.open()
    reaper = OrphanReaper(process_mark, snapshot_server.path)
    await reaper.start()
    spawner = _spawner(config, process_mark, events, node_id)
    port = OfferedPort(listening=isinstance(spawner, ZygoteSpawner), host=config.reach)
    node = NodeServices(
        config=config,
        id=node_id,
        process_mark=process_mark,
        log=log,
        reaper=reaper,
        spawner=spawner,
        port=port,
        snapshot_server=snapshot_server,
        timers=TimerWatch(supervision.timer_file) if supervision.watches_timers else None,
    )
    reaper_watch = asyncio.create_task(_restart_reaper(reaper))
    await spawner.start()
    health = await _answer_health(supervision.health_port)
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
        await snapshot_server.close()
        reaper_watch.cancel()
        await reaper.close()
        events.close()


async def _answer_health(port: int | None) -> HealthServer | None:
    """Answer health checks; if the port is taken, the job runs without answers."""
    if port is None:
        return None
    server = HealthServer(time.time, port)
    try:
        await server.start()
    except OSError as error:
        _log.warning("no answers to health checks on port %d: %s", port, error.strerror or error)
        return None
    return server


async def _restart_reaper(reaper: OrphanReaper) -> None:
    """Start the orphan reaper again when it was killed: only it outlives a killed agent."""
    while True:
        code = await reaper.wait()
        _log.warning("the orphan reaper ended (%s); it is started again", exit_text(code))
        try:
            await reaper.start()
        except OSError as error:
            _log.error(
                "no other orphan reaper: %s; a killed agent may leave processes behind", error
            )
            return
        await asyncio.sleep(_REAPER_PAUSE_S)


def _spawner(config: AgentConfig, process_mark: str, events: EventLog, node_id: str) -> Spawner:
    command = config.command
    if not command.zygote:
        return ExecSpawner(command.python)
    kinds = {
        "warm": EventKind.ZYGOTE_WARM,
        "died": EventKind.ZYGOTE_DIED,
        "problem": EventKind.ZYGOTE_PROBLEM,
        "fallback": EventKind.ZYGOTE_FALLBACK,
    }

    def log(kind: str, reason: str) -> None:
        event = LogEvent(kind=kinds[kind], reason=reason, node_id=node_id)
        console.log_event(event)
        events.log(event, "agent")

    env = {**without_secrets(config.environment), MARK_VARIABLE: process_mark}
    if config.node.local_world_size > 1:
        # As in each worker: OpenMP reads it when torch is imported.
        env.setdefault("OMP_NUM_THREADS", "1")
    return ZygoteSpawner(command.preload, env, command.python, log)
