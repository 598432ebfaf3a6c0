"""How the agent runs and watches its workers: the options and variables for that, checked.

It reads this machine's topology for --numa-binding and loads a class for --logs-specs, each only on
request. A variable with a senseless value has no effect, as in torchrun, and produces a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastane.errors import UsageError
from elastane.observe.logging import HANDLERS
from elastane.options.config import Supervision
from elastane.options.parser import Options
from elastane.options.spelling import nearest
from elastane.process.streams.plan import ChooseFiles
from elastane.process.worker_environment import LOCAL_RANK_MACRO, only_device

_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_STUCK = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"


def read_supervision(
    options: Options, environ: Mapping[str, str], local_world_size: int
) -> Supervision:
    """Return the settings; UsageError or ConfigurationError if this machine cannot do it."""
    virtual = options.flag("virtual_local_rank")
    if virtual:
        for local_rank in range(local_world_size):
            only_device(environ, local_rank)
    return Supervision(
        cpus=_cpus(options.text("numa_binding"), environ, local_world_size),
        virtual_local_rank=virtual,
        watches_timers=environ.get(_TIMERS) == "1",
        timer_file=environ.get("TORCHELASTIC_TIMER_FILE", ""),
        health_port=_port(environ),
        stuck_s=_stuck_s(environ) or 0.0,
        spares=_spares(options, local_world_size),
        replicas=_replicas(options),
        event_handler=_handler(options.text("event_log_handler")),
        choose_files=_chooser(options, local_world_size),
    )


def variable_notes(environ: Mapping[str, str]) -> list[str]:
    """Return a note for each variable without effect because its value makes no sense."""
    notes = []
    if environ.get(_PORT) and _port(environ) is None:
        notes.append(f"{_PORT} = {environ[_PORT]!r} is not a port: health checks get no answer")
    if environ.get(_STUCK) and _stuck_s(environ) is None:
        notes.append(f"{_STUCK} = {environ[_STUCK]!r} is not a number of seconds: it has no effect")
    return notes


def _cpus(mode: str, environ: Mapping[str, str], count: int) -> tuple[frozenset[int], ...]:
    if not mode:
        return ()
    from elastane.process.numa import bind
    from elastane.process.topology import read_topology

    return bind(read_topology(environ), mode, count)


def _spares(options: Options, local_world_size: int) -> int:
    count = options.whole("spares_per_node")
    if not 0 <= count <= local_world_size:
        raise UsageError(
            f"--spares-per-node = {count}",
            slug="bad-option-value",
            expected=f"0 to {local_world_size}, which is how many workers a node has",
        )
    if count and any(LOCAL_RANK_MACRO in arg for arg in options.script_args):
        raise UsageError(
            f"--spares-per-node = {count}, and {LOCAL_RANK_MACRO} in the script's arguments",
            slug="bad-option-value",
            expected="arguments that are the same for all workers: a spare has no rank yet",
            next_step="read job.local_rank after elastane.init(), or leave the spares out",
        )
    return count


def _replicas(options: Options) -> int:
    count = options.whole("snapshot_replicas")
    if count not in (0, 1):
        raise UsageError(
            f"--snapshot-replicas = {count}",
            slug="bad-option-value",
            expected="0, or 1: a copy on the next node, which the loss of any one node leaves",
        )
    return count


def _port(environ: Mapping[str, str]) -> int | None:
    text = environ.get(_PORT, "").strip()
    return int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else None


def _stuck_s(environ: Mapping[str, str]) -> float | None:
    try:
        seconds = float(environ.get(_STUCK) or 0)
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _handler(name: str) -> str:
    if name not in HANDLERS:
        near = nearest(name, HANDLERS)
        raise UsageError(
            f"--event-log-handler = {name!r}",
            slug="bad-option-value",
            expected=f"one of {', '.join(HANDLERS)}" + (f"; did you mean {near}?" if near else ""),
        )
    return name


def _chooser(options: Options, local_world_size: int) -> ChooseFiles | None:
    name = options.text("logs_specs")
    if not name:
        return None
    from elastane.options.logspecs import load_logs_specs

    return load_logs_specs(name, options, local_world_size)
