"""The command of the workers, the destination of their output, and their supervision.

Reads options and variables, checks that the script exists, reads this machine's topology for
--numa-binding, and loads a class for --logs-specs. That class is found among the installed entry
points `torchrun.logs_specs` and used as torch does: created once, then asked by `reify` before each
attempt. It may import torch, which the agent then holds too (0.2 GB). A variable with an unusable
value has no effect, as in torchrun, and produces a note.
"""

from __future__ import annotations

import importlib.machinery
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastane.errors import ConfigurationError, UsageError
from elastane.notices.rules import SHELL_WORDS, NoticeSource, read_sources
from elastane.observe.logging import HANDLERS
from elastane.options.config import Command, Supervision
from elastane.options.facts import torch_build
from elastane.options.parser import Options, nearest
from elastane.process.process import WorkerKind
from elastane.process.streams.files import default_base_dir
from elastane.process.streams.plan import (
    NO_FILES,
    ChooseFiles,
    GroupFiles,
    LogPlan,
    StdMap,
    StreamChoice,
    WorkerFiles,
    parse_needles,
    parse_ranks,
    parse_std_map,
    prefix_template,
)
from elastane.process.worker_environment import (
    LOCAL_RANK_MACRO,
    RANKS_MAY_CHANGE,
    RUN_IN_PLACE,
    only_device,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_PACKAGE = Path(__file__).resolve().parents[1] / "__init__.py"
_UNHANDLED = ("SIGKILL", "SIGSTOP", "SIGCHLD")
_PORT_MAX = 65535
# The default of --health-check-timeout.
_HEALTH_CHECK_S = 120.0
_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_STUCK = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
GROUP = "torchrun.logs_specs"


def read_command(options: Options, environ: Mapping[str, str]) -> Command:
    """Return what each worker runs; UsageError if the script cannot be found."""
    kind = _kind(options)
    python = environ.get("PYTHON_EXEC") or sys.executable
    # A zygote forks this interpreter; another one has to be executed.
    same_python = python == sys.executable
    fresh = options.flag("no_zygote") or _asks_for_spawn(options, kind)
    zygote = kind != "exec" and same_python and not fresh
    _check_target(kind, options.script)
    if kind != "exec" and not environ.get("PYTHONSAFEPATH"):
        _check_package(kind, options.script)
    target, args = options.script, options.script_args
    if options.flag("in_place"):
        kind, target, args = _in_place(kind, target, args, options.flag("ranks_may_change"))
    elif options.flag("ranks_may_change"):
        raise UsageError(
            "--ranks-may-change without --in-place",
            slug="bad-option-value",
            expected="both, for a script that does not call elastane.init(): one that does reads"
            " job.rank",
            next_step="add --in-place, or leave --ranks-may-change out",
        )
    preload = [name.strip() for name in options.text("preload").split(",")]
    if "preload" not in options.given and not torch_build():
        preload = []  # The default is torch and its parts; a job without torch needs none.
    return Command(
        kind=kind,
        target=target,
        args=args,
        python=python,
        zygote=zygote,
        preload=tuple(filter(None, preload)),
        cwd=str(Path.cwd()),
    )


def _in_place(
    kind: WorkerKind, target: str, args: tuple[str, ...], ranks_may_change: bool
) -> tuple[WorkerKind, str, tuple[str, ...]]:
    """Return the command that runs a script or module beneath collectives that survive faults."""
    if kind not in ("script", "module"):
        raise UsageError(
            f"--in-place with {'--no-python' if kind == 'exec' else '--run-path'}",
            slug="bad-option-value",
            expected="a Python script, or a module with -m",
            next_step="elastane run --in-place SCRIPT.py, or leave --in-place out",
        )
    ours = (RANKS_MAY_CHANGE,) if ranks_may_change else ()
    lead = ("-m", target) if kind == "module" else (target,)
    return "module", RUN_IN_PLACE, (*ours, *lead, *args)


def read_logs(options: Options, environ: Mapping[str, str], local_world_size: int) -> LogPlan:
    """Return where output goes; without --log-dir, to a folder of this user."""
    folder = options.text("log_dir") or default_base_dir()
    if folder not in NO_FILES:
        # A worker may change its folder before it writes its error file.
        folder = str(Path(folder).absolute())
    return LogPlan(
        base_dir=folder,
        redirects=_streams(options, "redirects", local_world_size),
        tee=_streams(options, "tee", local_world_size),
        console_ranks=parse_ranks(options.text("local_ranks_filter")),
        prefix=prefix_template(environ),
        needles={
            StreamChoice.OUT: parse_needles(options.text("duplicate_stdout_filters")),
            StreamChoice.ERR: parse_needles(options.text("duplicate_stderr_filters")),
        },
    )


def read_signals(options: Options) -> tuple[str, ...]:
    """Return the names of the signals that drain the agent."""
    names = [name.strip() for name in options.text("signals_to_handle").split(",")]
    for name in names:
        known = name.startswith("SIG") and name in signal.Signals.__members__
        if not known or name in _UNHANDLED:
            raise UsageError(
                f"--signals-to-handle: {name!r} cannot be handled",
                slug="bad-option-value",
                expected=_signal_hint(name),
                next_step="leave the option out for SIGTERM and the other defaults",
            )
    return tuple(dict.fromkeys(names))


def read_notices(options: Options) -> tuple[NoticeSource, ...]:
    """Return where notices are read; UsageError for what cannot be read on any node."""
    sources = read_sources(options.text("notices"))
    for source in sources:
        if source.kind == "command" and shutil.which(source.words[0]) is None:
            raise UsageError(
                f"--notices {source}: no such program, or it may not be executed",
                slug="bad-option-value",
                expected="a program in PATH, or the path of one that is executable",
                next_step=f"give its whole path, and run chmod +x {source.words[0]}",
            )
    return sources


def _health_check(options: Options) -> tuple[str, ...]:
    text = options.text("health_check")
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise options.bad("health_check", SHELL_WORDS) from None
    if text and (not words or shutil.which(words[0]) is None):
        raise options.bad(
            "health_check", "a program in PATH, or the path of one that is executable"
        )
    return words


def _health_check_s(options: Options) -> float:
    limit_s = options.seconds("health_check_timeout")
    if limit_s is not None and limit_s <= 0:
        raise options.bad("health_check_timeout", "more than 0 seconds")
    return _HEALTH_CHECK_S if limit_s is None else limit_s


def read_serve(options: Options) -> int | None:
    """Return the port of the job's page; None without one."""
    text = options.text("serve")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) > _PORT_MAX:
        raise UsageError(
            f"--serve {text}",
            slug="bad-option-value",
            expected=f"a port, 1 to {_PORT_MAX}, or 0 for a free one",
            next_step="--serve 8470",
        )
    return int(text)


def read_metrics(options: Options) -> tuple[str, int] | None:
    """Return address and port of the job's metrics; "": all addresses. None without them."""
    text = options.text("metrics_port")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdecimal() or int(port) > _PORT_MAX:
        raise UsageError(
            f"--metrics-port {text}",
            slug="bad-option-value",
            expected=f"a port, 1 to {_PORT_MAX}, or 0 for a free one, perhaps after an address",
            next_step="--metrics-port 9470",
        )
    return host, int(port)


def repeated_signals(signals: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the signals that are no order to hurry when they come again.

    Slurm sends SIGTERM twice to a job that it preempts, and again at the time limit after a notice
    by `--signal`. Its SIGKILL follows in any case. SIGINT is from a person.
    """
    return tuple(name for name in signals if name != "SIGINT") if "SLURM_JOB_ID" in environ else ()


def _signal_hint(name: str) -> str:
    if name in _UNHANDLED:
        return "another signal: this one is the kernel's or the agent's own"
    near = nearest(f"SIG{name.upper().removeprefix('SIG')}", signal.Signals.__members__)
    return (f"did you mean {near}? " if near else "") + "names such as SIGTERM,SIGINT,SIGUSR1"


def _kind(options: Options) -> WorkerKind:
    if options.flag("run_path"):
        return "run-path"  # it takes precedence over --no-python, as in torchrun
    if options.flag("no_python"):
        if options.flag("module"):
            raise UsageError(
                "--no-python and --module exclude each other",
                slug="usage",
                expected="one of them",
                next_step="leave --no-python out for a module, --module out for a program",
            )
        return "exec"
    return "module" if options.flag("module") else "script"


def _asks_for_spawn(options: Options, kind: WorkerKind) -> bool:
    """Whether --start-method asks for a new interpreter, as torchrun's does for run-path."""
    spawn = "start_method" in options.given and options.text("start_method") == "spawn"
    return kind == "run-path" and spawn


def _check_target(kind: WorkerKind, target: str) -> None:
    if kind == "module":
        return
    if kind == "exec":
        if shutil.which(target) is None:
            raise UsageError(
                f"--no-python {target}: no such program, or it may not be executed",
                slug="script-not-found",
                expected="a program in PATH, or the path of one that is executable",
                next_step=f"chmod +x {target}, if it is there; without --no-python it is a script",
            )
        return
    path = Path(target)
    try:
        is_there = bool(target) and path.exists()
    except PermissionError as error:
        raise _unreadable(path) from error
    if is_there:
        _check_readable_again(path)
        return
    raise UsageError(
        f"no such script: {target or repr(target)}",
        slug="script-not-found",
        where=str(Path.cwd()),
        expected=_nearest(path) or "the path of a script; for a module, -m NAME",
        next_step="name its path from this folder, or the whole path",
    )


def _check_readable_again(path: Path) -> None:
    """Refuse a script that only one worker can read, once, and a folder that is no program."""
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(
                f"{path} is a folder without __main__.py",
                slug="script-not-a-file",
                expected="the path of a script, or of a folder with __main__.py",
                next_step="name the script in it; for a package, -m NAME",
            )
    elif not path.is_file():
        raise UsageError(
            f"{path} is a pipe or a device: one worker would read the script, the others nothing",
            slug="script-not-a-file",
            expected="a regular file, which each worker reads, and again after a restart",
            next_step="write the script into a file",
        )
    elif not os.access(path, os.R_OK):
        raise _unreadable(path)


def _unreadable(path: Path) -> UsageError:
    return UsageError(
        f"{path}: this user may not read it",
        slug="script-not-a-file",
        where=str(path.absolute().parent),
        expected="a script that the user of elastane run can read",
        next_step=f"chmod a+r {shlex.quote(str(path))}, and a+x for the folders above it",
    )


def _check_package(kind: WorkerKind, target: str) -> None:
    """Refuse a file of the user's that workers would import in place of elastane.

    Python looks in the script's folder before the installed packages. The zygote and modules start
    in the current folder.
    """
    path = Path(target)
    folders = [Path.cwd()]
    if kind == "script":
        folders.append(path if path.is_dir() else path.resolve().parent)
    for folder in folders:
        spec = importlib.machinery.PathFinder.find_spec("elastane", [str(folder)])
        # A folder without __init__.py has no origin; an installed package goes before it.
        if spec is None or spec.origin is None or Path(spec.origin).resolve() == _PACKAGE:
            continue
        hides = Path(spec.origin)
        hides = hides.parent if hides.stem == "__init__" else hides
        raise UsageError(
            f"{hides} hides the package elastane from the workers",
            slug="package-hidden",
            where=str(folder),
            expected="no file of this name in the folder of the script or in the current folder",
            next_step=f"mv {shlex.quote(str(hides))} "
            f"{shlex.quote(str(hides.with_stem('my_elastane')))}",
        )


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"a folder {path.parent}, which does not exist"
    near = nearest(path.name, names)
    return f"did you mean {path.with_name(near)}?" if near else ""


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
        records=not options.flag("no_collective_ring"),
        replicas=_replicas(options),
        event_handler=_handler(options.text("event_log_handler")),
        choose_files=_chooser(options, local_world_size),
        health_check=_health_check(options),
        health_check_s=_health_check_s(options),
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
            next_step="--spares-per-node 1 is enough for one lost worker at a time",
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
            expected="0, or 1: one copy on the next node, which survives the loss of any one node",
            next_step="--snapshot-replicas 1",
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
            next_step="leave the option out: the event log is written in any case",
        )
    return name


def _chooser(options: Options, local_world_size: int) -> ChooseFiles | None:
    name = options.text("logs_specs")
    return load_logs_specs(name, options, local_world_size) if name else None


def load_logs_specs(name: str, options: Options, local_world_size: int) -> ChooseFiles:
    """Return a function that asks the named class; ConfigurationError if there is none."""
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    if name not in found.names:
        raise _no_such_class(name, found)
    try:
        specs = found[name].load()(
            log_dir=options.text("log_dir") or None,
            redirects=_streams(options, "redirects", local_world_size),
            tee=_streams(options, "tee", local_world_size),
            local_ranks_filter=set(parse_ranks(options.text("local_ranks_filter"))) or None,
        )
    except Exception as error:
        raise _failed(name, "cannot be made", error) from error
    return _Specs(name, specs)


@dataclass(frozen=True)
class _Specs:
    name: str
    specs: Any

    def __call__(self, envs: Mapping[int, Mapping[str, str]]) -> GroupFiles:
        changed = {local_rank: dict(env) for local_rank, env in envs.items()}
        try:
            dest = self.specs.reify(changed)
            workers = {
                local_rank: _files(dest, local_rank, _changes(env, changed[local_rank]))
                for local_rank, env in envs.items()
            }
            filtered = {
                StreamChoice.OUT: dest.filtered_stdout,
                StreamChoice.ERR: dest.filtered_stderr,
            }
        except Exception as error:
            raise _failed(self.name, "does not say where output goes", error) from error
        return GroupFiles(workers, {std: path for std, path in filtered.items() if path})


def _files(dest: Any, local_rank: int, env: Mapping[str, str]) -> WorkerFiles:
    """Return one worker's files of torch's LogsDest; KeyError if the worker is missing."""
    paths = {StreamChoice.OUT: dest.stdouts[local_rank], StreamChoice.ERR: dest.stderrs[local_rank]}
    tees = StreamChoice.NONE
    for std, teed in ((StreamChoice.OUT, dest.tee_stdouts), (StreamChoice.ERR, dest.tee_stderrs)):
        if teed.get(local_rank) and paths[std] not in ("", os.devnull):
            tees |= std
    error_file = dest.error_files.get(local_rank, "")
    return WorkerFiles(paths, tees, "" if error_file == os.devnull else error_file, env)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return what the class set in a worker's environment, without the error file's variable."""
    return {
        name: str(value)
        for name, value in after.items()
        if before.get(name) != value and name != "TORCHELASTIC_ERROR_FILE"
    }


def _streams(options: Options, dest: str, local_world_size: int) -> StdMap:
    return parse_std_map(options.text(dest), local_world_size, option=f"--{dest}")


def _no_such_class(name: str, found: EntryPoints) -> ConfigurationError:
    names = sorted(found.names)
    near = nearest(name, names)
    return ConfigurationError(
        f"--logs-specs {name}: nothing that is installed has an entry point {GROUP}: {name}",
        slug="logs-specs",
        expected=(f"one of {', '.join(names)}" if names else "none is installed")
        + (f"; did you mean {near}?" if near else ""),
        next_step=f'install the package whose pyproject.toml has it under entry-points."{GROUP}"',
    )


def _failed(name: str, what: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"--logs-specs {name}: it {what}: {type(error).__name__}: {error}",
        slug="logs-specs",
        expected="a class with the constructor and the reify() of torch's LogsSpecs",
    )
