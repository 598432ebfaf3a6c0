"""The entry of every command: finds the verb, runs it, and turns its errors into exit codes.

A verb is a module of the same name (with underscores for dashes) with `configure(parser)` and
`main(args) -> int`. A module with its own command line also has a `Parser`. Nothing is imported
before the verb is known, and a verb imports its work only when it works, so that every help is
fast.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from elastane.errors import ConfigurationError, ElastaneError, ExitCode, UsageError
from elastane.version import __version__

if TYPE_CHECKING:
    import argparse

# Verb: what it does. The module is elastane.cli.<verb>.
VERBS = {
    "run": "start or join a job, like torchrun",
    "status": "show the state of a job: nodes, round, and what it is waiting for",
    "logs": "show the output of a job's workers, merged by time",
    "explain": "explain why a job failed or restarted, attempt by attempt",
    "top": "show a job live in the terminal: nodes, speed, incidents, where the time went",
    "dashboard": "serve the web page of the jobs on this machine, or of a folder of logs",
    "metrics": "serve the metrics of the jobs on this machine to Prometheus",
    "traces": "send what a job did as spans to a collector of OpenTelemetry, or print them",
    "checkpoint": "list, verify, show and prune the checkpoints of a job",
    "kubernetes": "run jobs on Kubernetes: the operator, its manifests, the status of a job",
    "doctor": "say what on this node would keep a job from running, and what to do",
    "ray": "run a job on a Ray cluster, one agent on each node",
    "slurm": "print a batch script for Slurm that runs, requeues and continues a job",
    "verify-run": "compare the digest logs of two runs and find the first step that differs",
    "chaos": "inject faults into a job that runs on this machine",
    "completion": "print a script with which bash, zsh or tcsh completes verbs and options",
    "demo": "train a model on this machine while workers and nodes are killed",
}

# Modules that are no verbs: they run by their own names, as modules of torch.distributed do.
MODULES = {
    "launch": "start a job as torch.distributed.launch does: the script gets --local-rank",
}

# As in pyproject.toml.
MSGSPEC_MIN = (0, 19)


def main(argv: Sequence[str] | None = None, prog: str = "elastane") -> int:
    """Run one command and return its exit code."""
    if os.getpid() == 1:
        # The kernel ignores signals without a handler for the first process of a container. So a
        # SIGTERM would be lost before the verb sets its handler, and the container killed later.
        signal.signal(signal.SIGTERM, _end)
    words = list(sys.argv[1:] if argv is None else argv)
    return _with_exit_codes(lambda: _dispatch(words, prog), prog)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main_of(verb: str, argv: Sequence[str], prog: str) -> int:
    """Run one verb, or one of `MODULES`, under another name."""
    return _with_exit_codes(lambda: run_verb(verb, list(argv), prog), prog)


def _with_exit_codes(action: Callable[[], int], prog: str) -> int:
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A job may have names and errors in letters that the encoding of LC_ALL=C lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    own = sys.__stderr__
    if own is not None and sys.stderr is own:
        sys.stderr = io.TextIOWrapper(
            _Unfailing(own.fileno(), "w", closefd=False),
            encoding=own.encoding,
            errors=own.errors,
            write_through=True,
        )
    try:
        code = action()
        sys.stdout.flush()
        return code
    except ElastaneError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout closed the pipe, as head does. Python would raise again when it
        # flushes stdout at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that was closed (`>&-`), as for a daemon.

    Otherwise the next file or socket would get its number, and workers would write into that.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


class _Unfailing(io.FileIO):
    """A descriptor on which a failed write is no error.

    What cannot be written to a full disk must not end a job, nor change how a command ends.
    """

    def write(self, data: Any, /) -> int:
        """Write all of `data`; what the descriptor rejects is lost."""
        left = memoryview(data).cast("B")
        size = left.nbytes
        with contextlib.suppress(OSError):
            while left and (written := super().write(left)):
                left = left[written:]
        return size


def _dispatch(words: list[str], prog: str) -> int:
    if not words:
        print(usage(prog), file=sys.stderr)
        return int(ExitCode.USAGE)
    verb = words[0]
    if verb in ("-h", "--help", "help"):
        print(usage(prog))
        return 0
    if verb in ("-V", "--version", "version"):
        print(f"elastane {__version__}")
        return 0
    if verb not in VERBS:
        raise unknown_verb(verb, prog)
    return run_verb(verb, words[1:], f"{prog} {verb}")


def run_verb(verb: str, words: list[str], prog: str) -> int:
    """Parse the words of one verb and run it."""
    try:
        module = import_module(f"elastane.cli.{verb.replace('-', '_')}")
    except (ImportError, AttributeError):
        _check_msgspec()
        raise
    parser = make_parser(module, prog, VERBS.get(verb) or MODULES[verb])
    try:
        args = parser.parse_args(words)
    except SystemExit as stop:  # how argparse ends after --help
        return int(stop.code or 0)
    _check_msgspec()
    return int(module.main(args))


def _check_msgspec() -> None:
    """Refuse a msgspec that is missing, broken or too old: all messages and records need it."""
    try:
        import msgspec

        found = f"msgspec {msgspec.__version__} is too old"
        if tuple(int(part) for part in msgspec.__version__.split(".")[:2]) >= MSGSPEC_MIN:
            return
    except Exception as error:
        found = f"msgspec cannot be imported: {type(error).__name__}: {error}"
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("msgspec")
    oldest = ".".join(map(str, MSGSPEC_MIN))
    raise ConfigurationError(
        found,
        slug="package-unusable",
        where=(spec and spec.origin) or sys.executable,
        expected=f"msgspec {oldest} or later; PYTHONPATH goes before the installed packages",
        next_step=f"python -m pip install 'msgspec>={oldest}', or leave that folder out of"
        " PYTHONPATH",
    )


def make_parser(module: ModuleType, prog: str, description: str) -> argparse.ArgumentParser:
    """Return the configured parser of a verb's module."""
    from elastane.cli.parser import VerbParser

    factory = getattr(module, "Parser", VerbParser)
    parser: argparse.ArgumentParser = factory(
        prog=prog, description=description, allow_abbrev=False
    )
    module.configure(parser)
    return parser


def usage(prog: str) -> str:
    """Return the help of the command itself."""
    width = max(map(len, VERBS))
    lines = [
        f"usage: {prog} VERB [options]",
        "",
        "Elastic, fault-tolerant training for PyTorch.",
        "",
    ]
    lines += [f"  {verb:<{width}}  {what}" for verb, what in VERBS.items()]
    lines += ["", f"{prog} VERB --help explains one verb; {prog} --version prints the version."]
    return "\n".join(lines)


def unknown_verb(verb: str, prog: str) -> UsageError:
    """Return the error for an unknown verb, with the nearest known one."""
    from elastane.options.parser import nearest

    near = nearest(verb, VERBS)
    return UsageError(
        f"no such verb: {verb}",
        slug="unknown-verb",
        expected=f"did you mean {near}?" if near else "one of " + ", ".join(VERBS),
        next_step=_suggestion(verb, prog),
    )


def _suggestion(verb: str, prog: str) -> str:
    if verb in MODULES:
        return f"python -m elastane.{verb}"
    return f"{prog} run {verb}" if verb.endswith(".py") else f"{prog} --help"
