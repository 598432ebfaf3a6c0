"""Agents: they supervise workers inside the user's own process, in torch's shape.

Owns the loop: rendezvous, ranks, start, monitor, restart, exit barrier. Subclasses decide how
workers are started, monitored and stopped. Hooks have torch's names, so subclasses written for
torch work after renaming the import. Handlers are used only by their methods, so torch's handlers
work too. A spec that cannot run raises AssertionError, as in torch.

Ranks: agents exchange the sizes of their nodes through the store of their world. Nodes may differ
in their number of workers and in their role. Keys and values are those of torch 2.13. One more key
holds the restart count of the world, the highest of its agents'.

This loop differs from torch's, which ends healthy workers. A store or coordinator that is
unreachable for a while stops no worker here. If a member is lost before the ranks are agreed, the
agents repeat the rendezvous. All workers of a world receive one restart count. Workers that stay
unhealthy have failed. A node that was not needed gets a result instead of None. A failed exit
barrier is only logged. `elastane run` does not use this module: see elastane.agent.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import signal
import socket
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import PurePath
from typing import Any

from torch.distributed.elastic.utils.store import barrier

from elastane.elastic.events import Event, EventSource, record
from elastane.elastic.metrics import prof, put_metric
from elastane.elastic.multiprocessing import SignalException
from elastane.elastic.multiprocessing.errors import ProcessFailure
from elastane.elastic.rendezvous.api import RendezvousHandler, info_of
from elastane.elastic.rendezvous.static_tcp_rendezvous import OneMachineRendezvous

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_RoleInstanceInfo",
    "_get_fq_hostname",
]
DEFAULT_ROLE = "default"
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_RESTARTS = "torchelastic/restart_count"
_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_log = logging.getLogger(__name__)
# How long workers train on while the rendezvous handler is unreachable. In this time etcd can elect
# many leaders, and an administrator can restart a server.
HANDLER_SILENT_S = 120.0
# How many worlds in a row may lose a member between their rendezvous and their ranks.
_MEETINGS_MAX = 5
_AWAY = ("RendezvousConnectionError", "DistError", "OSError")
# Errors of `num_nodes_waiting` that do not mean an outage: the handler answered, a signal came, or
# the handler has a bug.
_FINAL = (
    *("RendezvousClosedError", "RendezvousGracefulExitError", "RendezvousStateError"),
    *("SignalException", "AssertionError", "AttributeError", "TypeError"),
)


@dataclass
class WorkerSpec:
    """What the workers of one role run: one spec for each role, the same on all nodes.

    `entrypoint` is a callable, or a command as str. `args` are its arguments, in which
    `${local_rank}` is replaced by the local rank. `fn` is a deprecated name of `entrypoint`.
    `rdzv_handler` has the methods of RendezvousHandler, torch's or elastane's; the default is a job
    on this machine only. `master_addr` and `master_port` override those of the rendezvous.
    `monitor_interval` is in seconds.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler = field(default_factory=OneMachineRendezvous)
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size = {self.local_world_size}: expected 1 or more")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval = {self.monitor_interval}: expected above 0")
        if self.fn:
            warnings.warn(
                "WorkerSpec.fn is deprecated: use WorkerSpec.entrypoint",
                category=DeprecationWarning,
                stacklevel=2,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("entrypoint is missing: expected a callable or a command")

    def get_entrypoint_name(self) -> str:
        """Return the callable's qualified name, or the last part of the command's path."""
        if isinstance(self.entrypoint, str):
            return PurePath(self.entrypoint).name
        assert self.entrypoint is not None
        # A functools.partial has no name of its own.
        return getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__qualname__)


class Worker:
    """The ranks of one worker; `id` is set by the agent, a pid in LocalElasticAgent."""

    __slots__ = ["global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size"]

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank}"
            f",role_rank={self.role_rank},world_size={self.world_size}"
            f",role_world_size={self.role_world_size}"
        )

    def __repr__(self) -> str:
        return str(self)


class WorkerState(str, Enum):  # noqa: UP042 - its text is torch's
    """The state of a worker group, which all its workers share: one failure fails all.

    INIT until the first start; HEALTHY or UNHEALTHY while they run; STOPPED by the agent, before a
    restart; SUCCEEDED or FAILED at the end; UNKNOWN if the agent lost track of them.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether worker processes exist, healthy or not."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """An agent's workers. The rendezvous sets the fields that are None at first."""

    __slots__ = [
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    ]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """How a run ended: all local workers succeeded, or it failed.

    `return_values` (of callables; None for commands) and `failures` are by global rank. Workers
    that the agent stopped are in neither.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether it failed."""
        return self.state == WorkerState.FAILED


class _RoleInstanceInfo:
    """What one agent publishes for the others of its world."""

    __slots__ = ["local_world_size", "rank", "restarts", "role"]

    def __init__(self, role: str, rank: int, local_world_size: int, restarts: int = 0) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size
        self.restarts = restarts

    def serialize(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in sorted(self.__slots__)}).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        """Parse it; torch's agents publish no restart count."""
        found = json.loads(data.decode())
        return _RoleInstanceInfo(
            found["role"], found["rank"], found["local_world_size"], found.get("restarts", 0)
        )

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: list[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        found = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (found[0], found[-1]) if found else (-1, -1)


@dataclass(frozen=True)
class Ranks:
    """The workers of this agent, and the restart count of their world; None if unknown."""

    workers: list[Worker]
    restarts: int | None


def assign(store: Any, place: tuple[int, int], spec: WorkerSpec, restarts: int) -> Ranks:
    """Agree on ranks with the world's other agents; `place` is (rank, number) of agents.

    Blocks until all have published; raises what the store raises. With
    TORCH_ELASTIC_WORKER_IDENTICAL=1 nothing is exchanged, and all agents are assumed to be alike.
    """
    group_rank, group_world_size = place
    if os.environ.get(_IDENTICAL, "0") == "1":
        base, total = group_rank * spec.local_world_size, group_world_size * spec.local_world_size
        return Ranks(_workers(spec, (base, total, base, total)), None)
    mine = _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size, restarts)
    store.set(f"{_ROLE_INFO}{group_rank}", mine.serialize())
    if group_rank == 0:
        found = store.multi_get([f"{_ROLE_INFO}{index}" for index in range(group_world_size)])
        _publish(store, [_RoleInstanceInfo.deserialize(data) for data in found])
    assigned = json.loads(store.get(f"{_ASSIGNED}{group_rank}"))
    count = int(store.get(_RESTARTS)) if store.check([_RESTARTS]) else None
    return Ranks(_workers(spec, assigned), count)


def _publish(store: Any, infos: list[_RoleInstanceInfo]) -> None:
    """Publish each agent's first ranks, and the totals."""
    role_sizes: dict[str, int] = defaultdict(int)
    for info in infos:
        role_sizes[info.role] += info.local_world_size
    total = sum(role_sizes.values())
    # The count is written before the ranks: an agent that reads its ranks also needs it.
    store.set(_RESTARTS, str(max(info.restarts for info in infos)))
    keys, values, base = [], [], 0
    role_bases: dict[str, int] = defaultdict(int)
    for index, info in enumerate(infos):
        keys.append(f"{_ASSIGNED}{index}")
        values.append(json.dumps([base, total, role_bases[info.role], role_sizes[info.role]]))
        base += info.local_world_size
        role_bases[info.role] += info.local_world_size
    store.multi_set(keys, values)


def _workers(spec: WorkerSpec, assigned: tuple[int, int, int, int] | list[int]) -> list[Worker]:
    base, total, role_base, role_total = assigned
    return [
        Worker(
            local_rank=rank,
            global_rank=base + rank,
            role_rank=role_base + rank,
            world_size=total,
            role_world_size=role_total,
        )
        for rank in range(spec.local_world_size)
    ]


def _get_fq_hostname() -> str:
    return socket.getfqdn(socket.gethostname())


class EventRecorder:
    """Records events and metrics of an agent."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int

    def get_event_failed(self) -> Event:
        """Return the event of a failed agent, with the exception that is being handled."""
        return self._construct_event(
            state="FAILED", source=EventSource.AGENT, raw_error=traceback.format_exc()
        )

    def get_event_succeeded(self) -> Event:
        """Return the event of an agent that completed, whether or not its workers succeeded."""
        return self._construct_event(state="SUCCEEDED", source=EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Generator[None, None, None]:
        """Record how long the context took."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - started_s) * 1000
            self._record(
                self._construct_event(state=state, source=EventSource.AGENT, duration_ms=took_ms)
            )

    def _record(self, event: Event) -> None:
        record(event, self._worker_group.spec.event_log_handler)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._record(
                self._construct_event(
                    state=self._get_worker_state(worker, result),
                    source=EventSource.WORKER,
                    worker=worker,
                    raw_error=json.dumps(failure.error_file_data) if failure else None,
                    exit_code=failure.exitcode if failure else None,
                    worker_pid=failure.pid if failure else None,
                )
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        failure = result.failures.get(worker.global_rank)
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not failure:
            return "TERMINATED"  # by the agent, since another worker failed
        if failure or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"Unknown worker: {worker.global_rank}")

    def _construct_event(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group = self._worker_group
        spec = group.spec
        more: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker:
            # Tuples of one, as torch records them.
            more["local_rank"] = (worker.local_rank,)
            more["role_rank"] = (worker.role_rank,)
            more["role_world_size"] = (worker.role_world_size,)
            more["exit_code"] = (exit_code,)
            more["worker_pid"] = (worker_pid,)
        return Event(
            f"torchelastic.worker.status.{state}",
            source=source,
            timestamp=int(time.time() * 1000),
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": worker.global_rank if worker else None,
                "group_rank": group.group_rank,
                "worker_id": str(worker.id) if worker else None,
                "role": spec.role,
                "hostname": _get_fq_hostname(),
                "state": state,
                "total_run_time": self._total_execution_time,
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": raw_error,
                "metadata": json.dumps(more),
                "agent_restarts": spec.max_restarts - self._remaining_restarts,
                "duration_ms": duration_ms,
            },
        )

    def _record_metrics(self, group_results: RunResult) -> None:
        spec = self._worker_group.spec
        put_run_metrics(
            spec.role, group_results.is_failed(), self._remaining_restarts, spec.max_restarts
        )


def put_run_metrics(role: str, is_failed: bool, remaining: int, allowed: int) -> None:
    """Publish the metrics of a run's end, under torch's names.

    `remaining` of the `allowed` restarts were not used. `flakiness` is in percent.
    """
    retried = remaining != allowed
    left = 0.0 if is_failed else (remaining + 1) / (allowed + 1)
    for name, value in (
        ("flakiness", int(100.0 - 100.0 * left)),
        ("run_total", 1),
        ("run_success_with_retries", int(not is_failed and retried)),
        ("run_success_no_retries", int(not is_failed and not retried)),
        ("run_failed_with_retries", int(is_failed and retried)),
        ("run_failed_no_retries", int(is_failed and not retried)),
    ):
        put_metric(f"workers.{role}.{name}", value)


class ElasticAgent(abc.ABC):
    """Starts workers and keeps them running; `run` blocks until they have ended."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, restarting them up to `max_restarts` times; return how they ended.

        Raises errors that are not the workers': of the rendezvous, of the agent, or by a signal.
        """

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers of a role; the object changes while they run."""


class SimpleElasticAgent(EventRecorder, ElasticAgent):
    """An agent of one role. A subclass implements the four abstract hooks."""

    def __init__(
        self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        # The restart count of the world, if its agents agreed on one.
        self._world_restarts: int | None = None
        self._handler_away_since_s: float | None = None

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """See ElasticAgent."""
        return self._worker_group

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers; return an id for each local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, in any state; without workers do nothing."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers, and return the new state of their group."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Release everything; workers get `death_sig`, and SIGKILL after `timeout` seconds."""

    @property
    def _restart_count(self) -> int:
        """How often workers were restarted: in this world if known, else by this agent."""
        own = self._worker_group.spec.max_restarts - self._remaining_restarts
        return own if self._world_restarts is None else self._world_restarts

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents, and set the fields of the group that describe the world."""
        for meeting in range(1, _MEETINGS_MAX + 1):
            try:
                self._meet(worker_group)
                return
            except _LostWorldError as error:
                if meeting == _MEETINGS_MAX:
                    raise error.why from None
                _log.warning(
                    "a world ended before its ranks were assigned, retrying: %s", error.why
                )

    def _meet(self, group: WorkerGroup) -> None:
        spec = group.spec
        self._world_restarts = None
        with self.record_duration("RENDEZVOUS"):
            info = info_of(spec.rdzv_handler.next_rendezvous(), spec.local_addr)
        self._store = info.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            try:
                workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
            except Exception as error:
                if not _is_one_of(error, _AWAY):
                    raise
                raise _LostWorldError(error) from error
        where = info.bootstrap_store_info
        group.workers, group.store = workers, info.store
        group.group_rank, group.group_world_size = info.rank, info.world_size
        group.master_addr = spec.master_addr or getattr(where, "master_addr", None)
        group.master_port = spec.master_port or getattr(where, "master_port", None)
        _log.info(
            "[%s] rendezvous complete: restart_count=%s master_addr=%s master_port=%s "
            "group_rank=%s group_world_size=%s workers=%s",
            *(spec.role, self._restart_count, group.master_addr, group.master_port),
            *(group.group_rank, group.group_world_size, workers),
        )

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this agent's workers with their ranks in the world."""
        own = spec.max_restarts - self._remaining_restarts
        ranks = assign(store, (group_rank, group_world_size), spec, own)
        self._world_restarts = ranks.restarts
        return ranks.workers

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Rendezvous, and start the workers; the previous ones have been stopped."""
        role = worker_group.spec.role
        _log.info("[%s] Rendezvous'ing worker group", role)
        self._rendezvous(worker_group)
        _log.info("[%s] Starting worker group", role)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            self._record(self._construct_event("START", EventSource.WORKER, worker))
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, rendezvous, and start them again."""
        _log.info("[%s] Stopping worker group", worker_group.spec.role)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See ElasticAgent. A SignalException is raised again when the workers are gone."""
        started_s = time.monotonic()
        death_sig: signal.Signals | None = None
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - started_s)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        except SignalException as error:
            _log.warning("Received %s death signal, shutting down workers", error.sigval)
            death_sig = error.sigval
            raise
        except Exception as error:
            if not _is_one_of(error, ("RendezvousGracefulExitError",)):
                raise
            _log.info("Rendezvous gracefully exited: %s", error)
            return RunResult(state=WorkerState.SUCCEEDED)
        finally:
            if death_sig is None:  # A subclass may have another default.
                self._shutdown(timeout=self._shutdown_timeout)
            else:
                self._shutdown(death_sig, timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - started_s)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        spec = group.spec
        role = spec.role
        _log.info("[%s] starting workers for entrypoint: %s", role, spec.get_entrypoint_name())
        self._initialize_workers(group)
        while True:
            assert group.state != WorkerState.INIT
            time.sleep(spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{role}.{result.state.name.lower()}", 1)
            if result.state == WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
                if self._remaining_restarts <= 0:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return replace(result, state=WorkerState.FAILED)
                self._retry(group)
            elif result.state == WorkerState.HEALTHY:
                self._follow_membership(group)
            else:
                raise RuntimeError(f"[{role}] Worker group in {result.state.name} state")

    def _retry(self, group: WorkerGroup) -> None:
        _log.warning(
            "[%s] Worker group %s. %s/%s attempts left; will restart worker group",
            *(group.spec.role, group.state.name, self._remaining_restarts),
            group.spec.max_restarts,
        )
        self._remaining_restarts -= 1
        self._restart_workers(group)

    def _follow_membership(self, group: WorkerGroup) -> None:
        """Restart the workers if the membership changes; this does not count as a restart."""
        waiting = self._nodes_waiting(group)
        if waiting > 0:
            _log.info(
                "[%s] Detected a change of membership (%s) from group_rank=%s; will restart "
                "worker group",
                *(group.spec.role, waiting, group.group_rank),
            )
            self._restart_workers(group)

    def _nodes_waiting(self, group: WorkerGroup) -> int:
        """Ask the handler; return 0 while it is unreachable, for up to HANDLER_SILENT_S."""
        try:
            waiting = group.spec.rdzv_handler.num_nodes_waiting()
        except Exception as error:
            now_s = time.monotonic()
            since_s = self._handler_away_since_s or now_s
            if _is_one_of(error, _FINAL) or now_s - since_s > HANDLER_SILENT_S:
                raise
            if self._handler_away_since_s is None:
                _log.warning("the rendezvous does not answer; workers keep running: %s", error)
            self._handler_away_since_s = since_s
            return 0
        if self._handler_away_since_s is not None:
            _log.warning("the rendezvous answers again")
        self._handler_away_since_s = None
        return waiting

    def _exit_barrier(self) -> None:
        """Wait, within a timeout, until the workers of all agents have ended.

        So an agent that serves the others' store stays for as long as they need it.
        """
        _log.info(
            "Local worker group finished (%s). Waiting %s seconds for other agents to finish",
            *(self._worker_group.state, self._exit_barrier_timeout),
        )
        self._in_exit_barrier = True
        try:
            barrier(
                self._store,
                self._worker_group.group_world_size or 1,
                _TERMINAL_STATE_SYNC_ID,
                barrier_timeout=self._exit_barrier_timeout,
            )
        except SignalException as error:
            _log.warning("Got termination signal: %s", error.sigval)
            raise
        except Exception as error:
            # The workers have succeeded, and the departure of another agent does not change that.
            _log.info("the exit barrier failed, not waiting for other agents: %s", error)
        finally:
            self._in_exit_barrier = False


class _LostWorldError(Exception):
    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


def _is_one_of(error: BaseException, names: tuple[str, ...]) -> bool:
    """Whether an exception's class or a base class has one of these names, in any module."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
