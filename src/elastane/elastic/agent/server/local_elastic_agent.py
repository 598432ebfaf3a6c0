"""An agent whose workers are child processes of this one.

Owns their environment, which equals that of `elastane run`'s workers, and their supervision: exits,
timers, uninterruptible sleep, health checks. `elastic.multiprocessing` owns how they run.

torch's agent is not used: it ignores `shutdown_timeout` on a restart, and its workers keep running
when it is killed. Here the health check survives restarts, too. The report file and the secret of
this process are not passed to its workers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from elastane.elastic import timer
from elastane.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elastane.elastic.agent.server.health_check_server import (
    HealthCheckServer,
    create_healthcheck_server,
)
from elastane.elastic.events import EventSource
from elastane.elastic.metrics import prof
from elastane.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsSpecs,
    PContext,
    start_processes,
)
from elastane.elastic.rendezvous.static_tcp_rendezvous import OneMachineRendezvous
from elastane.elastic.utils import macros
from elastane.elastic.utils.process_state import is_uninterruptible_state, read_proc_state
from elastane.errors import ConfigurationError
from elastane.process.worker_environment import (
    RunFacts,
    WorkerFacts,
    only_device,
    worker_environment,
)
from elastane.protocol.model import Assignment, Fence

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]
_log = logging.getLogger(__name__)
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
# The variables of this process that a worker's environment is computed from; the rest is inherited.
_PASSED_ON = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONFAULTHANDLER",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
# Variables that workers must not inherit: they are set to "", which counts as unset.
_NOT_PASSED_ON = ("ELASTANE_REPORT_FILE", "ELASTANE_TOKEN")
_WATCH_S = 0.1
_HEALTHY_S = 60


def _stuck_timeout_s(explicit: float | None) -> float:
    """Return the limit of uninterruptible sleep: as given, else from the variable; 0 is none."""
    try:
        text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "")
        return max(0.0, float(text or 0) if explicit is None else float(explicit))
    except ValueError:
        return 0.0


class _AliveCallbackProxy:
    """The callback of a health check; it returns the present time until a delegate is set."""

    def __init__(self) -> None:
        self._delegate: Callable[[], int] | None = None

    def __call__(self) -> int:
        return self._delegate() if self._delegate is not None else int(time.time())

    def set_delegate(self, delegate: Callable[[], int]) -> None:
        self._delegate = delegate


class LocalElasticAgent(SimpleElasticAgent):
    """Runs `spec.local_world_size` workers on this machine, started and stopped together.

    A callable and its arguments have to suit `start_method`. Without `logs_specs` workers write to
    the console. `exit_barrier_timeout` and `shutdown_timeout` are in seconds.
    `log_line_prefix_template` may contain `${role_name}`, `${local_rank}` and `${rank}`. With
    TORCHELASTIC_ENABLE_FILE_TIMER=1 workers may set timers on themselves; with
    TORCHELASTIC_HEALTH_CHECK_PORT health checks are answered. `uninterruptible_state_timeout` is
    how long a worker may sleep in the kernel before the group is given up.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._pcontext: PContext | None = None
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._worker_watchdog: timer.FileTimerServer | None = None
        self._logs_specs = logs_specs or DefaultLogsSpecs()
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _stuck_timeout_s(uninterruptible_state_timeout)
        self._uninterruptible_state_first_seen: dict[int, float] = {}
        self._rounds = 0

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert worker_group.store is not None, "a rendezvous comes first"
        assert spec.entrypoint is not None
        self._rounds += 1
        args: dict[int, tuple[Any, ...]] = {}
        envs: dict[int, dict[str, str]] = {}
        prefixes: dict[int, str] = {}
        for worker in worker_group.workers:
            rank = worker.local_rank
            envs[rank] = self._environment(worker_group, worker)
            self._set_local_rank_env(envs[rank], rank, spec)
            args[rank] = tuple(macros.substitute(list(spec.args), str(rank)))
            prefixes[rank] = Template(self._log_line_prefix_template or "").safe_substitute(
                role_name=spec.role, rank=worker.global_rank, local_rank=rank
            )
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes if self._log_line_prefix_template else None,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        self._pcontext.close_timeout_s = self._shutdown_timeout
        return dict(self._pcontext.pids())

    def _environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        spec, rank = group.spec, worker.local_rank
        assignment = Assignment(
            fence=Fence(self._rounds, 0),
            node_rank=group.group_rank or 0,
            nodes=group.group_world_size or 1,
            rank_base=worker.global_rank - rank,
            world_size=worker.world_size,
            role_rank_base=worker.role_rank - rank,
            role_world_size=worker.role_world_size,
            master_addr=str(group.master_addr),
            master_port=group.master_port or 0,
            agent_store=bool(getattr(spec.rdzv_handler, "use_agent_store", False)),
            restarts_used=self._restart_count,
            max_restarts=spec.max_restarts,
            reason="",
        )
        run_id = spec.rdzv_handler.get_run_id()
        run = RunFacts(
            run_id,
            socket.gethostname(),
            spec.role,
            spec.local_world_size,
            on_one_machine=isinstance(spec.rdzv_handler, OneMachineRendezvous),
        )
        base = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        kept = {name: "" for name in _NOT_PASSED_ON if name in os.environ}
        return {**worker_environment(base, assignment, run, WorkerFacts(rank)), **kept}

    def _set_local_rank_env(
        self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec
    ) -> None:
        if not spec.virtual_local_rank:
            worker_env["LOCAL_RANK"] = str(local_rank)
            return
        worker_env["LOCAL_RANK"] = "0"
        try:
            worker_env["CUDA_VISIBLE_DEVICES"] = only_device(os.environ, local_rank)
        except ConfigurationError as error:
            raise ValueError(error.what) from error

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._close_workers(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        try:
            self._close_workers(death_sig, timeout)
        finally:
            if self._health_check_server is not None:
                self._health_check_server.stop()
                self._health_check_server = None

    def _close_workers(self, death_sig: signal.Signals, timeout_s: int) -> None:
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            self._worker_watchdog = None
        if self._pcontext:
            self._pcontext.close(death_sig, timeout_s)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None, "the workers were started"
        workers = worker_group.workers
        expected, found = {w.id for w in workers}, set(self._pcontext.pids().values())
        if expected != found:
            _log.error(
                "[%s] worker pids do not match process_context pids. Expected: %s, actual: %s",
                *(worker_group.spec.role, expected, found),
            )
            return RunResult(state=WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if result is None:
            stuck = self._check_uninterruptible_state_timeout(
                worker_group, self._uninterruptible_state_timeout
            )
            return stuck or RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            failures = {workers[rank].global_rank: one for rank, one in result.failures.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        values = {workers[rank].global_rank: one for rank, one in result.return_values.items()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _check_uninterruptible_state_timeout(
        self, worker_group: WorkerGroup, timeout: float
    ) -> RunResult | None:
        """Give up the group if a worker sleeps in the kernel for `timeout` seconds; 0: never.

        The group is not restarted, since the resource that blocks the worker (a device, a mount)
        would block the next worker too.
        """
        if timeout <= 0 or self._pcontext is None:
            return None
        role, seen = worker_group.spec.role, self._uninterruptible_state_first_seen
        pids = set(self._pcontext.pids().values())
        for pid in set(seen) - pids:
            del seen[pid]
        asleep = {pid: self._update_uninterruptible_dwell(pid, role, timeout) for pid in pids}
        stuck = {pid: s for pid, s in asleep.items() if s is not None and s >= timeout}
        if not stuck:
            return None
        _log.error("[%s] workers in uninterruptible sleep (pid: s): %s; given up", role, stuck)
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.UNHEALTHY)

    def _update_uninterruptible_dwell(self, pid: int, role: str, timeout: float) -> float | None:
        """Return for how many seconds a process has slept in the kernel; None if it does not."""
        seen = self._uninterruptible_state_first_seen
        state = read_proc_state(pid)
        if state is None:
            return None
        if not is_uninterruptible_state(state):
            seen.pop(pid, None)
            return None
        if pid not in seen:
            seen[pid] = time.monotonic()
            _log.warning(
                "[%s] worker pid=%s is in uninterruptible sleep; UNHEALTHY after %.1f s of it",
                *(role, pid, timeout),
            )
        return time.monotonic() - seen[pid]

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Serve the workers' timers if that is enabled, and pass them the path of the pipe."""
        path = os.environ.get(TORCHELASTIC_TIMER_FILE)
        if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) == "1":
            path = path or str(Path(tempfile.gettempdir()) / f"watchdog_timer_{uuid.uuid4()}")
            self._worker_watchdog = timer.FileTimerServer(
                file_path=path,
                run_id=envs[0]["TORCHELASTIC_RUN_ID"] if envs else "",
                max_interval=_WATCH_S,
                daemon=True,
                log_event=self._log_watchdog_event,
            )
            self._worker_watchdog.start()
        if path is not None:
            for env in envs.values():
                env[TORCHELASTIC_TIMER_FILE] = path

    def _setup_healthcheck(self) -> None:
        """Start health checks if a port is given; they survive restarts."""
        port = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
        if port is None or self._health_check_server is not None:
            return
        if not port.isdecimal():
            _log.warning(
                "%s=%r is not a port: no health checks", TORCHELASTIC_HEALTH_CHECK_PORT, port
            )
            return
        self._health_check_server = create_healthcheck_server(
            alive_callback=self._get_alive_time, port=int(port), timeout=_HEALTHY_S
        )
        self._health_check_server.start()

    def _get_alive_time(self) -> int:
        """Return the time of the last progress: the timers', if they are watched."""
        watchdog = self._worker_watchdog
        if watchdog is not None and not self._in_exit_barrier:
            return watchdog.get_last_progress_time()
        return int(time.time())

    def _get_fq_hostname(self) -> str:
        return socket.getfqdn(socket.gethostname())

    def _log_watchdog_event(self, name: str, request: timer.FileTimerRequest | None) -> None:
        more: dict[str, str] = {"watchdog_event": name}
        if request is not None:
            more["worker_pid"] = str(request.worker_pid)
            more["scope_id"] = request.scope_id
            more["expiration_time"] = str(request.expiration_time)
            more["signal"] = str(request.signal)
        event = self._construct_event("RUNNING", EventSource.AGENT)
        metadata = {**event.metadata, "metadata": json.dumps(more)}
        self._record(replace(event, name=name, metadata=metadata))
