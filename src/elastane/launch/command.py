"""What the workers run, where their output goes, and which signals drain the agent.

Reads options only, but for one look at whether the script is there.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from elastane.errors import UsageError
from elastane.launch.config import Command, CommandKind, Logs, Streams
from elastane.launch.parser import Options

_STD_MAX = 3


def read_command(options: Options, environ: Mapping[str, str]) -> Command:
    """Return what each worker runs; UsageError where the script cannot be found."""
    kind = _kind(options)
    python = environ.get("PYTHON_EXEC") or sys.executable
    # A zygote forks this interpreter; another one has to be executed.
    same_python = python == sys.executable
    zygote = kind != "exec" and same_python and not options.flag("no_zygote")
    _check_target(kind, options.script)
    preload = [name.strip() for name in options.text("preload").split(",")]
    return Command(
        kind=kind,
        target=options.script,
        args=options.script_args,
        python=python,
        zygote=zygote,
        preload=tuple(filter(None, preload)),
    )


def read_logs(options: Options, environ: Mapping[str, str]) -> Logs:
    """Return where output goes."""
    folder = options.text("log_dir")
    return Logs(
        folder="" if folder == "/dev/null" else folder,
        files=folder != "/dev/null",
        redirects=read_streams("--redirects", options.text("redirects")),
        tee=read_streams("--tee", options.text("tee")),
        shown=_read_ranks(options.text("local_ranks_filter")),
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
    )


def read_streams(option: str, text: str) -> Streams:
    """Read `0` to `3`, or `RANK:STD,RANK:STD` (ranks that are not named have 0)."""
    try:
        if ":" not in text:
            return Streams(default=_std(text))
        pairs = [pair.split(":") for pair in text.split(",")]
        by_rank = {int(rank): _std(std) for rank, std in pairs}
    except ValueError:
        raise UsageError(
            f"{option} = {text!r}",
            slug="bad-option-value",
            expected="0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2",
        ) from None
    return Streams(by_rank=tuple(sorted(by_rank.items())))


def read_signals(options: Options) -> tuple[str, ...]:
    """Return the names of the signals at which the agent drains."""
    names = [name.strip() for name in options.text("signals_to_handle").split(",")]
    for name in names:
        known = name.startswith("SIG") and name in signal.Signals.__members__
        if not known or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(
                f"--signals-to-handle: {name!r} cannot be handled",
                slug="bad-option-value",
                expected="names such as SIGTERM,SIGINT,SIGHUP,SIGUSR1",
            )
    return tuple(dict.fromkeys(names))


def _kind(options: Options) -> CommandKind:
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


def _check_target(kind: CommandKind, target: str) -> None:
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
    if path.exists():
        return
    raise UsageError(
        f"no such script: {target}",
        slug="script-not-found",
        where=str(Path.cwd()),
        expected=_nearest(path) or "the path of a script; for a module, -m NAME",
    )


def _nearest(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"a folder {path.parent}, which does not exist"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.with_name(near[0])}?" if near else ""


def _std(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _STD_MAX:
        raise ValueError(text)
    return value


def _read_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    pieces = text.split(",")
    if not all(piece.strip().isdecimal() for piece in pieces):
        raise UsageError(
            f"--local-ranks-filter = {text!r}",
            slug="bad-option-value",
            expected="local ranks with commas between, as in 0,1,2",
        )
    return frozenset(int(piece) for piece in pieces)
