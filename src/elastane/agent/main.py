"""One agent, put together from its configuration and taken apart again.

`agent.node` owns what belongs to this machine; this module owns the connection, the leadership and
the loop. On the way out the workers end before the coordinator does, and the coordinator informs
all agents before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from dataclasses import dataclass

from msgspec import structs

from elastane.agent.ending import report_end
from elastane.agent.etcd_sidecar import sidecar
from elastane.agent.health_check import HealthCheck
from elastane.agent.link import CoordinatorLink, Dialer, first_to_end
from elastane.agent.node import NodeServices, node_services, register_node
from elastane.agent.rules import AgentCore
from elastane.agent.shell import AgentShell, Outlets
from elastane.agent.snapshot_server import replica_peers
from elastane.agent.worker import GroupSetup
from elastane.coordinator.host import CoordinatorHost, operator_bridge_of
from elastane.coordinator.leadership import (
    EndpointLeadership,
    Leadership,
    StoreLeadership,
    first_contact,
)
from elastane.errors import ConfigurationError, ElastaneError, ExitCode, StoreError
from elastane.notices.watch import NoticeWatch
from elastane.observe import logging as console
from elastane.options.config import AgentConfig
from elastane.options.facts import versions
from elastane.options.rendezvous import new_incarnation
from elastane.options.secret import Keyring
from elastane.process import rpc
from elastane.process.endpoint import Endpoint
from elastane.process.files import JobRegistry
from elastane.process.orphan_reaper import MARK_VARIABLE
from elastane.process.reach import doubts_of
from elastane.process.tls import TlsConfig
from elastane.process.unanswered import own_addresses
from elastane.process.worker_environment import RunFacts, without_secrets
from elastane.protocol.effects import Exit
from elastane.protocol.events import AgentEvent
from elastane.protocol.limits import STOP_MARGIN_S
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import NodeSpec, Outcome
from elastane.stores import JobKeys, make_store

_log = logging.getLogger("elastane.options")
# Sessions of a large job on the coordinator's host; the administrator sets the hard limit.
_DESCRIPTORS_WANTED = 65536
# A worker's own descriptors, at most a dozen, are moved above CONTROL_FD before they are placed.
_DESCRIPTORS_MIN = 300


def launch(config: AgentConfig) -> int:
    """Run one agent to its end; returns its exit code."""
    _raise_descriptor_limit()
    # With SIGCHLD ignored, inherited from a parent process, the end of a child would not be seen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return asyncio.run(_launch(config))
    finally:
        console.flush()


async def _launch(config: AgentConfig) -> int:
    host = socket.gethostname()
    with contextlib.ExitStack() as stack:
        registry, node_id = register_node(config, host, stack)
        console.setup(node_id, config.environment.get("LOGLEVEL", ""))
        async with node_services(config, node_id, host) as node:
            try:
                exit_ = await _Agent(node, registry).run()
            except ElastaneError as error:  # The store failed before this agent had a coordinator.
                exit_ = _exit_of(error)
            node.snapshot_server.end_by(exit_.out_by_s)
    report_end(config, exit_)
    return exit_.code


async def _warn_of_address(local_addr: str) -> None:
    """Warn if others may not find this node: their workers would only time out."""
    if local_addr and (doubts := await doubts_of(local_addr)):
        _log.warning("%s", doubts)


@dataclass(frozen=True)
class _Parts:
    """What one run of an agent consists of; `keys` are None without a store."""

    core: AgentCore
    shell: AgentShell
    dialer: Dialer
    link: CoordinatorLink
    leadership: Leadership
    keys: JobKeys | None


class _Agent:
    """The connection, the leadership and the loop of one agent."""

    def __init__(self, node: NodeServices, registry: JobRegistry | None) -> None:
        self._node = node
        self._config = node.config
        self._registry = registry
        # For programs of the site, which get no secret of the job.
        self._environ = {
            **without_secrets(node.config.environment),
            MARK_VARIABLE: node.process_mark,
        }
        self._health = HealthCheck(node.config.supervision, self._environ, node.id, node.log.write)

    async def run(self) -> Exit:
        """Take part in the job until it ends, or this agent leaves it."""
        await self._health.before_join()
        async with contextlib.AsyncExitStack() as stack:
            exit_ = await self._run(await self._store_keys(stack))
        outcome = exit_.outcome or self._health.outcome
        return exit_ if outcome is None else structs.replace(exit_, outcome=outcome)

    async def _run(self, keys: JobKeys | None) -> Exit:
        config, node = self._config, self._node
        token = config.rendezvous.token
        if keys is not None:
            token = await first_contact(keys, token, config.spec.timing.join_timeout_s)
        keyring = Keyring(config.spec.job, token, config.rendezvous.token_file)
        await keyring.reload()
        access = rpc.Access(config.spec.job, keyring.secrets()[0], _tls(config), keyring.secrets)
        parts = self._parts(keys, keyring, access)
        replicas = config.supervision.replicas
        node.snapshot_server.start(
            parts.shell.checkpoint_saved,
            (lambda: replica_peers(config, keyring)) if replicas else None,
        )
        parts.shell.handle_signals(config.signals, config.repeated_signals)
        node.log.write(
            LogEvent(
                kind=EventKind.AGENT_STARTED,
                reason=f"job {config.spec.job}, pid {os.getpid()}",
                node_id=node.id,
            )
        )

        def changed() -> None:
            parts.dialer.token_changed()
            node.snapshot_server.send_peers()

        watch = asyncio.create_task(keyring.watch(changed))
        check = asyncio.create_task(_warn_of_address(config.node.local_addr))
        notices = self._notice_watch(parts.shell)
        notices.start()
        self._health.start(parts.shell.post)
        try:
            return await self._run_tasks(parts)
        finally:
            watch.cancel()
            check.cancel()
            await self._health.close()
            await notices.close()

    def _notice_watch(self, shell: AgentShell) -> NoticeWatch:
        """Return the watch of this node's notices, which begin early enough for a drain."""
        config, timing = self._config, self._config.spec.timing
        lead_s = timing.drain_timeout_s + timing.shutdown_timeout_s + STOP_MARGIN_S
        return NoticeWatch(config.notices, shell.post, lead_s, self._environ)

    def _parts(self, keys: JobKeys | None, keyring: Keyring, access: rpc.Access) -> _Parts:
        config, node = self._config, self._node
        bridge = operator_bridge_of(keys, config.environment)
        hosting = CoordinatorHost(config.spec, access, node.log.write_as_coordinator, bridge)
        leadership = self._leadership(keys, hosting)
        core = AgentCore(
            config.spec,
            self._node_spec(),
            node.port.open(),
            time.monotonic(),
            self_fencing=keys is not None,
        )
        dialer = Dialer(
            access, lambda: keyring.token, node.id, self._registry, config.logs.base_dir
        )
        queue: asyncio.Queue[AgentEvent] = asyncio.Queue()
        link = CoordinatorLink(leadership, dialer, queue.put_nowait, config.spec)
        outlets = Outlets(
            link,
            node.log.write,
            node.reaper.allow_until,
            self._health.fault_seen,
            node.snapshot_server.copies,
        )
        shell = AgentShell(core, self._group_setup(), node.port, queue, outlets)
        return _Parts(core, shell, dialer, link, leadership, keys)

    async def _run_tasks(self, parts: _Parts) -> Exit:
        link, leadership = parts.link, parts.leadership
        work = asyncio.create_task(parts.shell.run())
        linking, leading = asyncio.create_task(link.run()), asyncio.create_task(leadership.run())
        exit_: Exit | None = None
        try:
            await first_to_end(work, linking, leading)
            if work.done():
                exit_ = work.result()
            else:
                exit_ = await recorded_exit(
                    _failed(linking, leading), parts.keys, was_welcomed=parts.core.welcomed
                )
            return exit_
        finally:
            await link.flush()
            for task in (work, linking, leading):
                task.cancel()
            await asyncio.gather(work, linking, leading, return_exceptions=True)
            await leadership.close(ended=exit_ is not None and exit_.outcome is not None)
            parts.dialer.close()

    async def _store_keys(self, stack: contextlib.AsyncExitStack) -> JobKeys | None:
        """Return the job's keys in its store; None without a store."""
        rendezvous, config = self._config.rendezvous, self._config
        place, conf = rendezvous.store, dict(rendezvous.store_conf)
        if rendezvous.sidecar:
            place = await stack.enter_async_context(
                sidecar(config.environment, self._node.process_mark)
            )
        store = make_store(rendezvous.backend, place, conf) if place else None
        return JobKeys(store, config.spec.job) if store is not None else None

    def _leadership(self, keys: JobKeys | None, hosting: CoordinatorHost) -> Leadership:
        config = self._config
        if keys is not None:
            return StoreLeadership(keys, self._node.id, config.reach, hosting)
        endpoint = Endpoint(config.rendezvous.host or "127.0.0.1", config.rendezvous.port)
        return EndpointLeadership(endpoint, config.rendezvous.hosts, hosting)

    def _node_spec(self) -> NodeSpec:
        requested = self._config.node
        return NodeSpec(
            node_id=self._node.id,
            incarnation=new_incarnation(self._config.environment),
            local_world_size=requested.local_world_size,
            role=requested.role,
            node_rank=requested.node_rank,
            local_addr=requested.local_addr,
            topology=requested.topology,
            addresses=own_addresses(),
            versions=versions(),
        )

    def _group_setup(self) -> GroupSetup:
        config, command = self._config, self._config.command
        folder = config.logs.job_dir(config.spec.job).absolute()
        return GroupSetup(
            kind=command.kind,
            target=command.target,
            args=command.args,
            cwd=command.cwd,
            environment=config.environment,
            process_mark=self._node.process_mark,
            run=RunFacts(
                job=config.spec.job,
                node_id=self._node.id,
                role=config.node.role,
                local_world_size=config.node.local_world_size,
                virtual_local_rank=config.supervision.virtual_local_rank,
                timer_file=self._node.timers.path if self._node.timers else "",
                signals=config.signals,
                snapshot_server=self._node.snapshot_server.path,
                on_one_machine=config.is_on_one_machine,
                job_folder=str(folder) if config.logs.has_files else "",
            ),
            logs=config.logs,
            spawner=self._node.spawner,
            cpus=config.supervision.cpus,
            stuck_s=config.supervision.stuck_s,
            spares=config.supervision.spares,
            hang_floor_s=config.spec.timing.hang_floor_s,
            abort_limit_s=config.spec.timing.abort_limit_s,
            error_exit_limit_s=config.spec.timing.error_exit_limit_s,
            records=config.supervision.records,
            timers=self._node.timers,
            choose_files=config.supervision.choose_files,
        )


async def recorded_exit(exit_: Exit, keys: JobKeys | None, *, was_welcomed: bool) -> Exit:
    """Return the exit of the job's record, if the leadership found the job closed.

    The coordinator may have died between its record and its messages, or this host stood still
    meanwhile. The leadership then reports that the job has ended, which is a configuration mistake
    for a new node. An agent that took part ends like all others instead. If the store does not
    answer, the mistake is reported.
    """
    closed = exit_.outcome is not None and exit_.outcome.slug == "rdzv-closed"
    if keys is None or not was_welcomed or not closed:
        return exit_
    try:
        record = await keys.load()
    except StoreError:
        return exit_
    outcome = record.outcome if record is not None else None
    return exit_ if outcome is None else Exit(outcome.exit_code, outcome.reason, outcome)


def _failed(*tasks: asyncio.Task[None]) -> Exit:
    """Return the exit for an error of the connection or the leadership; raise other errors."""
    for task in tasks:
        if task.done() and task.exception() is not None:
            error = task.exception()
            if not isinstance(error, ElastaneError):
                raise error  # type: ignore[misc]
            return _exit_of(error)
    return Exit(int(ExitCode.TRY_AGAIN), "the connection ended", None)


def _exit_of(error: ElastaneError) -> Exit:
    outcome = Outcome(
        ok=False,
        reason=error.what,
        slug=error.slug,
        exit_code=error.exit_code,
        next_step=error.next_step,
    )
    return Exit(int(error.exit_code), error.what, outcome)


def _tls(config: AgentConfig) -> TlsConfig | None:
    tls = config.rendezvous.tls
    return TlsConfig(cert=tls.cert, key=tls.key, ca=tls.ca) if tls else None


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    limit = max(soft, min(wanted, _DESCRIPTORS_WANTED))
    if limit < _DESCRIPTORS_MIN:
        raise ConfigurationError(
            f"an agent and its workers may open {limit} files each",
            slug="descriptor-limit",
            expected=f"{_DESCRIPTORS_MIN} or more",
            next_step="ulimit -n 1024",
        )
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
