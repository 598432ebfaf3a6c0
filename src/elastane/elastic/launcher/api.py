"""Launch a function or a command on this node, from Python.

    def train(epochs): ...
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d")
    results = elastic_launch(config, train)(10)

Owns the configuration, and the choice of the agent. With one of elastane's rendezvous backends it
is `elastane run` in a child process: the configuration is translated into its options, and its
report into the exceptions that callers of torch's launcher catch. With a registered handler, or the
caller's own LogsSpecs class, it is LocalElasticAgent in this process.

Fails as the launcher does for invalid options, and with ConfigurationError for arguments that
cannot be pickled. Source: torch.distributed.launcher.api.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from elastane import errors
from elastane.elastic import events, metrics
from elastane.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerSpec,
    put_run_metrics,
)
from elastane.elastic.agent.server.health_check_server import HealthCheckServer
from elastane.elastic.agent.server.local_elastic_agent import (
    LocalElasticAgent,
    _AliveCallbackProxy,
)
from elastane.elastic.metrics import put_metric
from elastane.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException, Std
from elastane.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from elastane.elastic.rendezvous import RendezvousParameters
from elastane.elastic.rendezvous import registry as rdzv_registry
from elastane.elastic.rendezvous.api import raise_as_api
from elastane.elastic.rendezvous.utils import parse_rendezvous_endpoint
from elastane.errors import NodeUnfitError
from elastane.functions.failure import error_of
from elastane.functions.job import EndedJob, run_command, run_function
from elastane.functions.payload import FunctionCall, pack
from elastane.functions.request import RequestedOptions, as_text
from elastane.functions.signals import raise_on
from elastane.observe.report import FinalReport, ReportedFailure
from elastane.options.build import read_nproc
from elastane.options.rendezvous import is_builtin
from elastane.process import environment
from elastane.protocol.diagnosis import headline
from elastane.worker.call import MODULE

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_log = logging.getLogger(__name__)

# LaunchConfig always fills this in; only torch's oldest backend reads it.
_TIMEOUT_S = 900

_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

_NS = 1_000_000_000


@dataclass
class LaunchConfig:
    """How to launch: nodes, workers, rendezvous, restarts, logs.

    `rdzv_timeout` is legacy: it sets `rdzv_configs["timeout"]`, 900 s by default. Raises ValueError
    for a negative shutdown_timeout (seconds).
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _TIMEOUT_S)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")


class elastic_launch:  # noqa: N801 - torch's name
    """Calls a function, or runs a command, in this node's workers; see launch_agent."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run to the end, passing `args` to each worker; see launch_agent."""
        return launch_agent(
            self._config,
            self._entrypoint,
            list(args),
            health_check_server=self._health_check_server,
        )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run workers to the end; return the values of this node's workers, by global rank.

    Raises ChildFailedError if workers failed more often than max_restarts allows, and what the
    rendezvous raises. Raises SignalException if a signal ended this process's part; the rendezvous
    then stays open, and other nodes continue.
    """
    config.run_id = config.run_id or str(uuid.uuid4().int)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master = _addr_and_port(parameters)
    if not entrypoint:
        raise AssertionError("entrypoint is missing: expected a callable or a command")
    name = _entrypoint_name(entrypoint, args)
    signals = _not_ignored(config.signals_to_handle)
    # The supervisor of the workers handles these signals too, and reads this variable.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(signals)
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    with _signals_raised(signals):
        job = job_of(config, entrypoint, args, name)
        if job is not None:
            try:
                return job.run()
            finally:
                if health_check_server is not None:
                    health_check_server.stop()
        spec = _spec(config, entrypoint, args, parameters, master)
        return _run_here(config, spec, health_check_server, name)


@dataclass(frozen=True)
class FunctionRun:
    """A function, or a command, to run on this machine.

    `local_world_size` is the number of workers, or cpu, gpu or auto: one for each GPU, or without
    GPUs one for each CPU. The output of workers is shown and, with `log_dir`, saved there.
    `monitor_interval` (seconds) has no effect, since the end of a worker is noticed at once.
    """

    entrypoint: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    log_dir: str | None = None
    monitor_interval: float = 0.1
    max_restarts: int = 3
    local_world_size: int | str = "auto"
    role: str = "default"

    def run(self) -> dict[int, Any]:
        """Run to the end; return the workers' values, by rank. See elastic_launch."""
        config = LaunchConfig(
            1,
            1,
            read_nproc(str(self.local_world_size), os.environ),
            logs_specs=DefaultLogsSpecs(self.log_dir, tee=Std.ALL if self.log_dir else Std.NONE),
            rdzv_backend="elastane",
            role=self.role,
            monitor_interval=self.monitor_interval,
            max_restarts=self.max_restarts,
        )
        return elastic_launch(config, self.entrypoint)(*self.args)


def job_of(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any], name: str
) -> CalledJob | None:
    """Return the job of a configuration; None if its agent has to run in this process.

    That is the case for handlers and LogsSpecs of the caller's own. It is also the case for
    arguments that only a direct child can receive, such as queues, or any object with the start
    method fork.
    """
    if not _runs_as_child(config):
        return None
    environ = dict(environment.snapshot())
    if config.log_line_prefix_template:
        environ[_PREFIX_TEMPLATE] = config.log_line_prefix_template
    values = _run_options(config)
    alone = config.nproc_per_node if config.max_nodes == 1 else 0
    if isinstance(entrypoint, str):
        requested = RequestedOptions(
            {**values, "no_python": "1"}, entrypoint, tuple(map(str, args)), ambient=False
        )
        return CalledJob(requested, {}, environ, name, alone, config.role, config.max_restarts)
    try:
        files = pack(FunctionCall(entrypoint, tuple(args), macros=True))
    except errors.ConfigurationError as error:
        if config.start_method == "fork" or isinstance(error.__cause__, RuntimeError):
            return None
        raise
    requested = RequestedOptions(values, MODULE, ambient=False)
    return CalledJob(requested, files, environ, name, alone, config.role, config.max_restarts)


@dataclass(frozen=True)
class CalledJob:
    """A job that is ready to run; without files it runs a command."""

    requested: RequestedOptions
    files: Mapping[str, bytes]
    environ: Mapping[str, str]
    name: str
    commands: int
    # For metrics: the workers' role, and the restart budget of the job.
    role: str = DEFAULT_ROLE
    allowed: int = 0

    def _put_metrics(self, ended: EndedJob) -> None:
        """Publish the metrics of the agent, since the agent itself runs in another process."""
        if ended.report is None:
            return
        left = max(0, self.allowed - ended.report.restarts_used)
        put_metric(f"workers.{self.role}.remaining_restarts", left)
        state = "failed" if ended.code else "succeeded"
        put_metric(f"workers.{self.role}.{state}", 1)
        put_run_metrics(self.role, ended.code != 0, left, self.allowed)

    def run(self) -> dict[int, Any]:
        """Run it; see launch_agent. A command returns None on each rank of a job of one node."""
        if self.files:
            ended = run_function(self.requested, self.files, self.environ, self.name)
        else:
            ended = run_command(self.requested, self.environ)
        self._put_metrics(ended)
        if ended.code != 0:
            _raise_failure(self.name, ended)
        return ended.values if self.files else dict.fromkeys(range(self.commands))


class JobFailedError(ChildFailedError):
    """The failures of all nodes of a job, with the root cause that its coordinator found."""

    def __init__(self, name: str, failures: dict[int, ProcessFailure], report: FinalReport) -> None:
        self.report = report
        self._root = report.root_cause.rank if report.root_cause else next(iter(failures))
        super().__init__(name, failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and the failure that caused the others."""
        return self._root, self.failures[self._root]


def _runs_as_child(config: LaunchConfig) -> bool:
    plain = type(config.logs_specs).__name__ == "DefaultLogsSpecs"
    stored = config.rdzv_configs.get("store_type") == "file"  # torch's FileStore
    return is_builtin(config.rdzv_backend) and plain and not stored


class _Logs(Protocol):
    """The fields of DefaultLogsSpecs, torch's or elastane's."""

    root_log_dir: str
    _redirects: Any
    _tee: Any
    _local_ranks_filter: set[int] | None


def _run_options(config: LaunchConfig) -> dict[str, str]:
    """Return the configuration as options of `elastane run`."""
    logs = cast(_Logs, config.logs_specs)
    numa = getattr(config.numa_options, "affinity_mode", None)
    return as_text(
        {
            "nnodes": (config.min_nodes, config.max_nodes),
            "nproc_per_node": config.nproc_per_node,
            "role": config.role,
            "rdzv_backend": config.rdzv_backend,
            "rdzv_endpoint": config.rdzv_endpoint,
            "rdzv_id": config.run_id,
            "rdzv_conf": _conf(config.rdzv_configs),
            "max_restarts": config.max_restarts,
            "monitor_interval": config.monitor_interval,
            "local_addr": config.local_addr,
            "event_log_handler": config.event_log_handler,
            "numa_binding": getattr(numa, "value", numa),
            "signals_to_handle": config.signals_to_handle,
            "duplicate_stdout_filters": config.duplicate_stdout_filters,
            "duplicate_stderr_filters": config.duplicate_stderr_filters,
            "virtual_local_rank": config.virtual_local_rank,
            "shutdown_timeout": config.shutdown_timeout,
            "log_dir": logs.root_log_dir,
            "redirects": _streams(logs._redirects),
            "tee": _streams(logs._tee),
            "local_ranks_filter": sorted(logs._local_ranks_filter or ()) or None,
        }
    )


def _conf(configs: Mapping[str, Any]) -> dict[str, Any]:
    conf = {key: value for key, value in configs.items() if value is not None}
    if "join_timeout" in conf or conf.get("timeout") == _TIMEOUT_S:
        conf.pop("timeout", None)
    return conf


def _streams(choice: Any) -> str:
    if isinstance(choice, dict):
        return ",".join(f"{rank}:{int(std)}" for rank, std in choice.items()) or "0"
    return str(int(choice))


def _raise_failure(name: str, ended: EndedJob) -> None:
    report = ended.report
    if report is not None and (report.failures or report.root_cause):
        raise JobFailedError(name, _failures(report), report)
    error = error_of(name, report, ended.code)
    if isinstance(error, errors.MembershipError | errors.StoreError):
        raise_as_api(error)
    raise error


def _failures(report: FinalReport) -> dict[int, ProcessFailure]:
    """Return each rank's last failure, and the root cause for its rank."""
    found = {failure.rank: failure for failure in report.failures}
    if report.root_cause is not None:
        found[report.root_cause.rank] = report.root_cause
    return {rank: _failure(failure) for rank, failure in sorted(found.items())}


def _failure(one: ReportedFailure) -> ProcessFailure:
    failure = ProcessFailure(one.local_rank, one.pid, one.exit_code, one.error_file)
    failure.timestamp = one.time_ns // _NS
    if one.message and not isinstance(failure.message, dict):
        # The error file is on another node or missing, so the agent's report is used.
        failure.message = {
            "message": headline(one.message),
            "extraInfo": {"py_callstack": one.message, "timestamp": str(failure.timestamp)},
        }
    return failure


def _run_here(
    config: LaunchConfig,
    spec: WorkerSpec,
    health_check_server: HealthCheckServer | None,
    name: str,
) -> dict[int, Any]:
    """Run the agent in this process."""
    assert config.logs_specs is not None and config.shutdown_timeout is not None
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
    )
    proxy = getattr(health_check_server, "alive_callback", None)
    if isinstance(proxy, _AliveCallbackProxy):
        proxy.set_delegate(agent._get_alive_time)
    stays_open = False
    try:
        result: RunResult = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            # A worker stuck in the kernel has no failure to report.
            if not result.failures:
                raise NodeUnfitError(
                    f"{name}: the workers are unhealthy, and cannot be restarted here",
                    slug="worker-unkillable",
                    next_step="another node; this one may need a reboot",
                )
            raise ChildFailedError(name=name, failures=result.failures)
        return result.return_values
    except ChildFailedError:
        raise
    except SignalException:
        stays_open = True
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        if not stays_open:
            spec.rdzv_handler.shutdown()


def _spec(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: list[Any],
    parameters: RendezvousParameters,
    master: tuple[str | None, int | None],
) -> WorkerSpec:
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master[0],
        master_port=master[1],
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _not_ignored(names: str) -> list[str]:
    """Return these signals without those that the caller ignores, which stay ignored.

    So a job that was started by nohup survives the end of its terminal.
    """
    known = signal.Signals.__members__
    return [
        name
        for name in filter(None, (part.strip() for part in names.split(",")))
        if name not in known or signal.getsignal(known[name]) is not signal.SIG_IGN
    ]


@contextmanager
def _signals_raised(names: list[str]) -> Iterator[None]:
    """Raise SignalException at these signals, and restore the caller's handlers afterwards."""
    with raise_on(
        [signal.Signals[name] for name in names if name in signal.Signals.__members__],
        lambda one: SignalException(f"Process {os.getpid()} got signal: {one}", sigval=one),
    ):
        yield


def _addr_and_port(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Return where the workers of a static rendezvous meet; other backends choose it."""
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    host, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if not endpoint or port == -1:
        raise ValueError(
            f"rdzv_endpoint = {endpoint!r} for the static backend: expected HOST:PORT, as "
            "--master-addr and --master-port give it"
        )
    return host, port


def _entrypoint_name(entrypoint: Callable[..., Any] | str, args: list[Any]) -> str:
    """Return the name of the workers in errors: a function, a program, or python's script."""
    if callable(entrypoint):
        return str(getattr(entrypoint, "__name__", type(entrypoint).__name__))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint
