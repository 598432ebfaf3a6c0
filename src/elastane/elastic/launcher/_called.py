"""Runs a LaunchConfig as a job of `elastane run`, with its agent in a child process.

Owns the translation of the configuration into the launcher's options, and of the agent's report
into the exceptions that callers of torch's launcher catch. How it fails: as the launcher does for
invalid options; ConfigurationError for arguments that cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from elastane import errors
from elastane.elastic.agent.server._spec import DEFAULT_ROLE
from elastane.elastic.agent.server._telling import put_run_metrics
from elastane.elastic.metrics import put_metric
from elastane.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from elastane.elastic.rendezvous._errors import raise_as_api
from elastane.functions.failure import error_of
from elastane.functions.job import EndedJob, run_command, run_function
from elastane.functions.payload import FunctionCall, pack
from elastane.functions.wish import RequestedOptions, as_text
from elastane.observe.report import FinalReport, ReportedFailure
from elastane.options.backend import is_builtin
from elastane.process import environment
from elastane.protocol.diagnosis import headline
from elastane.worker.call import MODULE

if TYPE_CHECKING:
    from elastane.elastic.launcher.api import LaunchConfig

# LaunchConfig always fills this in; only torch's oldest backend reads it.
_FILLED_IN_TIMEOUT = 900
_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NS = 1_000_000_000


class JobFailedError(ChildFailedError):
    """The failures of all nodes of a job, with the root cause that its coordinator found."""

    def __init__(self, name: str, failures: dict[int, ProcessFailure], report: FinalReport) -> None:
        self.report = report
        self._root = report.root_cause.rank if report.root_cause else next(iter(failures))
        super().__init__(name, failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and the failure that caused the others."""
        return self._root, self.failures[self._root]


@dataclass(frozen=True)
class CalledJob:
    """A job that is ready to run; without files it runs a command."""

    wish: RequestedOptions
    files: Mapping[str, bytes]
    environ: Mapping[str, str]
    name: str
    commands: int
    # For metrics: the workers' role, and the restart budget of the job.
    role: str = DEFAULT_ROLE
    allowed: int = 0

    def _put_metrics(self, ended: EndedJob) -> None:
        """Publish the metrics that an agent in this process would: the real agent is in another."""
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
            ended = run_function(self.wish, self.files, self.environ, self.name)
        else:
            ended = run_command(self.wish, self.environ)
        self._put_metrics(ended)
        if ended.code != 0:
            _raise(self.name, ended)
        return ended.values if self.files else dict.fromkeys(range(self.commands))


def job_of(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any], name: str
) -> CalledJob | None:
    """Return the job of a configuration; None if its agent has to run in this process.

    That is the case for handlers and LogsSpecs of the caller's own. It is also the case for
    arguments that only a direct child can receive, such as queues, or any object with the start
    method fork.
    """
    if not _is_ours(config):
        return None
    environ = dict(environment.snapshot())
    if config.log_line_prefix_template:
        environ[_PREFIX_TEMPLATE] = config.log_line_prefix_template
    values = _values(config)
    alone = config.nproc_per_node if config.max_nodes == 1 else 0
    if isinstance(entrypoint, str):
        wish = RequestedOptions(
            {**values, "no_python": "1"}, entrypoint, tuple(map(str, args)), ambient=False
        )
        return CalledJob(wish, {}, environ, name, alone, config.role, config.max_restarts)
    try:
        files = pack(FunctionCall(entrypoint, tuple(args), macros=True))
    except errors.ConfigurationError as error:
        if config.start_method == "fork" or isinstance(error.__cause__, RuntimeError):
            return None
        raise
    wish = RequestedOptions(values, MODULE, ambient=False)
    return CalledJob(wish, files, environ, name, alone, config.role, config.max_restarts)


def _is_ours(config: LaunchConfig) -> bool:
    plain = type(config.logs_specs).__name__ == "DefaultLogsSpecs"
    stored = config.rdzv_configs.get("store_type") == "file"  # torch's FileStore
    return is_builtin(config.rdzv_backend) and plain and not stored


class _Logs(Protocol):
    """The fields of DefaultLogsSpecs, torch's or elastane's."""

    root_log_dir: str
    _redirects: Any
    _tee: Any
    _local_ranks_filter: set[int] | None


def _values(config: LaunchConfig) -> dict[str, str]:
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
    if "join_timeout" in conf or conf.get("timeout") == _FILLED_IN_TIMEOUT:
        conf.pop("timeout", None)
    return conf


def _streams(choice: Any) -> str:
    if isinstance(choice, dict):
        return ",".join(f"{rank}:{int(std)}" for rank, std in choice.items()) or "0"
    return str(int(choice))


def _raise(name: str, ended: EndedJob) -> None:
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
        # Its file is on another node or missing: use what its agent reported.
        failure.message = {
            "message": headline(one.message),
            "extraInfo": {"py_callstack": one.message, "timestamp": str(failure.timestamp)},
        }
    return failure
