"""`elastane run --rdzv-backend NAME` for a rendezvous handler of another package.

Owns the translation of the launcher's options for LocalElasticAgent, and of its end into exit code,
box and report. Such a handler runs in this process, with torch, and decides which nodes are in the
world. Departures and failures on other nodes are visible only if the handler reports them.

How it fails: UsageError for an unknown name, ConfigurationError for a handler that cannot be
loaded. Neither elastane.elastic nor torch is imported before such a handler was found.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from elastane.agent.ending import show
from elastane.errors import ConfigurationError, ElastaneError, ExitCode, UsageError
from elastane.observe import logging as console
from elastane.observe.report import report_of, write_launcher_error, write_report
from elastane.options.build import read_nnodes, read_nproc
from elastane.options.parser import Options, nearest
from elastane.options.rendezvous import is_builtin, names
from elastane.options.workers import read_command, read_logs, read_signals
from elastane.process.execspawn import RUN_PATH_CODE
from elastane.protocol.diagnosis import Sighting, failures_in_order, root_cause
from elastane.protocol.model import Failure, Fence, Outcome
from elastane.stores import GROUP

if TYPE_CHECKING:
    from elastane.elastic.launcher.api import LaunchConfig
    from elastane.elastic.multiprocessing import LogsSpecs
    from elastane.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_GROUP, _LOGS_GROUP = "torchrun.handlers", "torchrun.logs_specs"
_REGISTRY = "elastane.elastic.rendezvous.api"
_TORCHS_REGISTRY = "torch.distributed.elastic.rendezvous.registry"
_LEADS = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH_CODE]}
_log = logging.getLogger(__name__)
_NS = 1_000_000_000
_EXIT_CODES = {
    "RendezvousTimeoutError": ExitCode.TRY_AGAIN,
    "RendezvousConnectionError": ExitCode.TRY_AGAIN,
    "RendezvousClosedError": ExitCode.CONFIGURATION,
    "RendezvousError": ExitCode.TRY_AGAIN,
}


def is_wanted(options: Options) -> bool:
    """Return whether the backend is a handler of another package; UsageError if unknown."""
    name = options.text("rdzv_backend")
    if is_builtin(name):
        return False
    offered = _offered_names()
    if name in offered:
        return not options.flag("standalone")
    known = [*names(), *sorted(offered)]
    near = nearest(name, known)
    raise UsageError(
        f"no such --rdzv-backend: {name}",
        slug="bad-option-value",
        expected=(f"did you mean {near}? " if near else "") + "one of " + ", ".join(known),
        next_step=f"a package that brings it has an entry point {name!r} in the group {GROUP} "
        f"(a store) or {_GROUP} (a handler)",
    )


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Launch, report how it ended, and return the exit code."""
    from elastane.elastic.launcher.api import launch_agent
    from elastane.elastic.multiprocessing import SignalException
    from elastane.elastic.multiprocessing.errors import ChildFailedError

    console.setup(socket.gethostname(), environ.get("LOGLEVEL", ""))
    argv = argv_of(options, environ)
    try:
        config = config_of(options, environ)
        launch_agent(config, argv[0], argv[1:])
        outcome = Outcome(ok=True, reason="all workers of this node succeeded")
    except ChildFailedError as error:
        outcome = _outcome_of_workers(error, options.whole("max_restarts"))
    except SignalException as error:
        outcome = Outcome(
            ok=False, reason=f"got {error.sigval.name}", exit_code=int(ExitCode.DRAINED)
        )
    except Exception as error:
        outcome = _outcome_of_handler(error)
    _report_end(options, environ, outcome)
    return outcome.exit_code


def _outcome_of_handler(error: Exception) -> Outcome:
    """Return the outcome for an error of the rendezvous; raise any other error again.

    The class of the error is recognized by its name, since handlers for torch raise torch's errors.
    """
    known = [] if isinstance(error, ElastaneError) else type(error).__mro__
    for kind in known:
        if kind.__name__ in _EXIT_CODES:
            code = int(_EXIT_CODES[kind.__name__])
            return Outcome(ok=False, reason=f"{type(error).__name__}: {error}", exit_code=code)
    raise error


def _outcome_of_workers(error: ChildFailedError, max_restarts: int) -> Outcome:
    """Return the outcome of workers that failed for good, with their root cause on this node."""
    now_s, host = time.time(), socket.gethostname()
    sightings = [
        Sighting(node_id=host, at_s=failure.time_ns / _NS, failure=_failure(rank, failure, now_s))
        for rank, failure in error.failures.items()
    ]
    reason = "no restarts are allowed (--max-restarts 0)"
    if max_restarts:
        reason = f"all {max_restarts} restarts of this node are used (--max-restarts)"
    return Outcome(
        ok=False,
        reason=reason,
        slug="worker-failed",
        exit_code=int(ExitCode.WORKER_FAILED),
        # A handler does not expose the numbers of its rounds.
        cause=msgspec.structs.replace(root_cause(sightings, Fence(0, 0)), fence=None),
        failures=failures_in_order(sightings, now_s),
    )


def _failure(rank: int, failure: ProcessFailure, now_s: float) -> Failure:
    has_file = bool(failure.error_file) and failure.error_file != "<N/A>"
    return Failure(
        local_rank=failure.local_rank,
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        age_s=max(0.0, now_s - failure.time_ns / _NS),
        message=_message(failure) if has_file else "",
        error_file=failure.error_file if has_file else "",
    )


def _message(failure: ProcessFailure) -> str:
    if not isinstance(failure.message, dict):
        return str(failure.message)
    extra = failure.message.get("extraInfo") or {}
    return str(extra.get("py_callstack") or failure.message.get("message", ""))


def _report_end(options: Options, environ: Mapping[str, str], outcome: Outcome) -> None:
    path, own = options.text("report_file"), environ.get("TORCHELASTIC_ERROR_FILE", "")
    report = report_of(options.text("rdzv_id"), outcome, outcome.exit_code, options.text("log_dir"))
    try:
        if path:
            write_report(path, report)
        if own and not outcome.ok:
            write_launcher_error(own, report)
    except OSError as error:
        _log.warning("the report of how the job ended was not written: %s", error)
    if not outcome.ok:
        show(outcome, options.text("log_dir"))


def argv_of(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the command of a worker."""
    command = read_command(options, environ)
    words = [command.target, *command.args]
    if command.kind == "exec":
        return words
    return [command.python, "-u", *_LEADS[command.kind], *words]


def config_of(options: Options, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the options as torch's launcher has them."""
    from elastane.elastic.launcher.api import LaunchConfig
    from elastane.process.streams.plan import parse_needles

    _check_handler(options.text("rdzv_backend"))
    low, high = read_nnodes(options.text("nnodes"))
    count = read_nproc(options.text("nproc_per_node"), environ)
    shutdown_s = options.seconds("shutdown_timeout")
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=count,
        logs_specs=_logs(options, environ, count),
        run_id=options.text("rdzv_id"),
        role=options.text("role"),
        rdzv_backend=options.text("rdzv_backend"),
        rdzv_endpoint=options.text("rdzv_endpoint"),
        rdzv_configs=_pairs(options.text("rdzv_conf")),
        max_restarts=options.whole("max_restarts"),
        monitor_interval=options.seconds("monitor_interval") or 0.1,
        start_method=options.text("start_method"),
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=options.text("local_addr") or None,
        event_log_handler=options.text("event_log_handler"),
        numa_options=_numa(options.text("numa_binding")),
        signals_to_handle=",".join(read_signals(options)),
        duplicate_stdout_filters=list(parse_needles(options.text("duplicate_stdout_filters"))),
        duplicate_stderr_filters=list(parse_needles(options.text("duplicate_stderr_filters"))),
        virtual_local_rank=options.flag("virtual_local_rank"),
        shutdown_timeout=int(shutdown_s) if shutdown_s is not None else None,
    )


def _check_handler(name: str) -> None:
    """Load the plug-in first, so that its error is reported before anything else happens."""
    found: dict[str, EntryPoint] = {one.name: one for one in entry_points(group=_GROUP)}
    if name not in found:
        return
    # A plug-in for torch imports torch's registry. That registry loads all plug-ins and would warn
    # about this one, which is only half loaded.
    registry_log = logging.getLogger(_TORCHS_REGISTRY)
    registry_log.disabled = True
    try:
        found[name].load()
    except Exception as error:
        raise ConfigurationError(
            f"--rdzv-backend {name}: its handler cannot be loaded: {type(error).__name__}: {error}",
            slug="rdzv-handler",
            where=f"entry point {found[name].value} of group {_GROUP}",
            expected="a callable that returns the creator of a RendezvousHandler",
            next_step=f"python -c 'import {found[name].module}'",
        ) from error
    finally:
        registry_log.disabled = False


def _numa(mode: str) -> Any | None:
    if not mode:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(mode))


def _logs(options: Options, environ: Mapping[str, str], count: int) -> LogsSpecs:
    """Return where output goes, decided by the class of --logs-specs if given."""
    from elastane.elastic.multiprocessing import DefaultLogsSpecs, Std
    from elastane.options.workers import load_logs_specs

    plan = read_logs(options, environ, count)
    kind: Any = DefaultLogsSpecs
    name = options.text("logs_specs")
    if name:
        load_logs_specs(name, options, count)  # Raises an error if the class cannot be used.
        kind = entry_points(group=_LOGS_GROUP)[name].load()
    specs: LogsSpecs = kind(
        log_dir=plan.base_dir if options.text("log_dir") else None,
        redirects={rank: Std(int(std)) for rank, std in plan.redirects.items()},
        tee={rank: Std(int(std)) for rank, std in plan.tee.items()},
        local_ranks_filter=set(plan.console_ranks) or None,
    )
    return specs


def _pairs(text: str) -> dict[str, Any]:
    """Return KEY=VALUE,... as the handler's own reader expects it: as text."""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _offered_names() -> set[str]:
    """Return the names that installed packages, or this process, offer besides elastane's."""
    offered = {entry.name for entry in entry_points(group=_GROUP)}
    registry: Any = sys.modules.get(_REGISTRY)
    if registry is not None:
        offered |= set(registry.rendezvous_handler_registry._registry)
    return {name for name in offered if not is_builtin(name)}
