"""Child processes that run functions or commands, with output in files and failures reported.

    context = start_processes("trainer", fn, args={0: (1,), 1: (2,)}, envs={0: {}, 1: {}},
                              logs_specs=DefaultLogsSpecs())
    result = context.wait()     # all have returned, or one has failed and all were ended

Source: torch.distributed.elastic.multiprocessing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastane.elastic import use_torchs
from elastane.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    SubprocessContext,
    _check_ranks,
    to_map,
)
from elastane.elastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]
use_torchs(__name__, "redirects")


def start_processes(  # noqa: PLR0913, PLR0917 - torch's signature
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start a process for each local rank of `args`; return the context that waits for them.

    A str is run as a command, a callable in a process made by `start_method`. `envs` is added to
    this process's environment. RuntimeError if the keys of `args` and `envs` are not local ranks 0
    to N.
    """
    count = len(args)
    _check_ranks(dict.fromkeys(args, ""), count, "args")
    _check_ranks(dict.fromkeys(envs, ""), count, "envs")
    if isinstance(entrypoint, str):
        context: PContext = SubprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
        )
    else:
        context = MultiprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            start_method=start_method,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
        )
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
