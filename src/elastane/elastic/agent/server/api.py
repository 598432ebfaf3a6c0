"""Agents: they supervise workers inside the user's own process, in torch's shape.

Owns the loop: rendezvous, start, monitor, restart, exit barrier. Subclasses decide how workers are
started, monitored and stopped. Hooks have torch's names, so subclasses written for torch work after
renaming the import. Handlers are used only by their methods, so torch's handlers work too.

Differences from torch 2.13, on purpose. A store or a coordinator that is unreachable for a while
stops no healthy workers. A world that lost a member before its ranks were agreed meets again. All
workers of a world receive one restart count. Workers that are unhealthy for good have failed. A
node that was not needed gets a result instead of None. A failed exit barrier is only logged.
`elastane run` does not use this module: see elastane.agent.
"""

from __future__ import annotations

import abc
import logging
import signal
import time
from dataclasses import replace
from typing import Any

from elastane.elastic.agent.server._ranks import _RoleInstanceInfo, assign
from elastane.elastic.agent.server._recording import EventRecorder, _get_fq_hostname
from elastane.elastic.agent.server._spec import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elastane.elastic.events import EventSource
from elastane.elastic.metrics import prof, put_metric
from elastane.elastic.multiprocessing import SignalException
from elastane.elastic.rendezvous.api import info_of
from elastane.elastic.utils.store import barrier

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
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_log = logging.getLogger(__name__)
# How long an unreachable rendezvous handler is tolerated while workers train. etcd can elect a
# leader many times in this time, and an administrator can restart a server.
HANDLER_SILENT_S = 120.0
# The most consecutive worlds that may lose a member between their rendezvous and their ranks.
_MEETINGS_MAX = 5
_AWAY = ("RendezvousConnectionError", "DistError", "OSError")
# Errors of `num_nodes_waiting` that are no outage: an answer, a signal, or a defect of the handler.
_FINAL = (
    *("RendezvousClosedError", "RendezvousGracefulExitError", "RendezvousStateError"),
    *("SignalException", "AssertionError", "AttributeError", "TypeError"),
)


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
        """Rendezvous, and start the workers; the old ones are stopped already."""
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
    """Whether an exception's class or base has one of these names, torch's or elastane's."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
