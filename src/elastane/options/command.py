"""What the workers run, where their output goes, and which signals drain the agent.

Reads options only, except that it checks whether the script exists.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from elastane.errors import UsageError
from elastane.options.config import Command
from elastane.options.facts import torch_build
from elastane.options.parser import Options
from elastane.options.spelling import nearest
from elastane.process.process import WorkerKind
from elastane.process.streams.files import default_base_dir
from elastane.process.streams.plan import (
    NO_FILES,
    LogPlan,
    StdMap,
    StreamChoice,
    parse_needles,
    parse_ranks,
    parse_std_map,
    prefix_template,
)

_UNHANDLED = ("SIGKILL", "SIGSTOP", "SIGCHLD")


def read_command(options: Options, environ: Mapping[str, str]) -> Command:
    """Return what each worker runs; UsageError if the script cannot be found."""
    kind = _kind(options)
    python = environ.get("PYTHON_EXEC") or sys.executable
    # A zygote forks this interpreter; another one has to be executed.
    same_python = python == sys.executable
    fresh = options.flag("no_zygote") or _asks_for_spawn(options, kind)
    zygote = kind != "exec" and same_python and not fresh
    _check_target(kind, options.script)
    preload = [name.strip() for name in options.text("preload").split(",")]
    if "preload" not in options.given and not torch_build():
        preload = []  # The default is torch and its parts; a job without torch needs none.
    return Command(
        kind=kind,
        target=options.script,
        args=options.script_args,
        python=python,
        zygote=zygote,
        preload=tuple(filter(None, preload)),
        cwd=str(Path.cwd()),
    )


def read_logs(options: Options, environ: Mapping[str, str], local_world_size: int) -> LogPlan:
    """Return where output goes; without --log-dir, to a folder of this user."""

    def streams(dest: str) -> StdMap:
        return parse_std_map(options.text(dest), local_world_size, option=f"--{dest}")

    folder = options.text("log_dir") or default_base_dir()
    if folder not in NO_FILES:
        # A worker may change its folder before it writes its error file.
        folder = str(Path(folder).absolute())
    return LogPlan(
        base_dir=folder,
        redirects=streams("redirects"),
        tee=streams("tee"),
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
            )
    return tuple(dict.fromkeys(names))


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
            )
        return
    path = Path(target)
    if target and path.exists():
        return
    raise UsageError(
        f"no such script: {target or repr(target)}",
        slug="script-not-found",
        where=str(Path.cwd()),
        expected=_nearest(path) or "the path of a script; for a module, -m NAME",
    )


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"a folder {path.parent}, which does not exist"
    near = nearest(path.name, names)
    return f"did you mean {path.with_name(near)}?" if near else ""
