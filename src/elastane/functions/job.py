"""One call of a function as a job: its folder, its agent, its end.

Owns the private folder that caller, agent and workers share, and removes it. A killed caller leaves
its folder behind; the next call removes it. How it fails: it raises the launcher's errors before
anything starts; afterwards it returns what happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastane.functions.agent import CalledAgent, signal_of
from elastane.functions.failure import agent_lost
from elastane.functions.payload import collect, no_room, write_files
from elastane.functions.request import FILE, OF_A_FUNCTION, REPORT, RequestedOptions
from elastane.observe.report import FinalReport, read_report, write_report
from elastane.options.build import build
from elastane.process import environment
from elastane.process.files import process_start
from elastane.protocol.limits import Timing
from elastane.protocol.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
_PREFIX = "elastane-call"
# The agent's time to end, beyond its bounds for checkpoints and SIGTERM.
_STOP_MARGIN_S = 10.0
# The workers need the interpreter that pickled the function. The error file belongs to the caller,
# which may itself be a worker and may handle the failure.
_NOT_INHERITED = ("PYTHON_EXEC", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class EndedJob:
    """How a job ended: exit code, report, and the values returned on this node, by rank."""

    code: int
    report: FinalReport | None
    values: dict[int, Any] = field(default_factory=dict)


def run_function(
    request: RequestedOptions, files: Mapping[str, bytes], environ: Mapping[str, str], name: str
) -> EndedJob:
    """Run the packed function `files` as a job; blocks until it ends."""
    with _folder() as folder:
        write_files(folder, files)
        values = {**request.values, **OF_A_FUNCTION}
        ended = _run(folder, replace(request, values=values, script_args=(str(folder),)), environ)
        if ended.code != 0:
            return ended
        if ended.report is None:
            raise agent_lost(name, ended.code)
        attempt = f"{ended.report.round}.{ended.report.attempt}"
        return replace(ended, values=collect(folder, name, attempt))


def run_command(request: RequestedOptions, environ: Mapping[str, str]) -> EndedJob:
    """Run the command of `request` as a job; blocks until it ends."""
    with _folder() as folder:
        return _run(folder, request, environ)


def _run(folder: Path, request: RequestedOptions, environ: Mapping[str, str]) -> EndedJob:
    environ = {key: value for key, value in environ.items() if key not in _NOT_INHERITED}
    config = build(request.options(environ), environ)
    # A path of its own: the requested file may hold the report of an earlier or concurrent job.
    request = replace(request, values={**request.values, "report_file": str(folder / REPORT)})
    write_files(folder, {FILE: request.to_json()})
    try:
        code = _exit_code(folder, environ, config.spec.timing)
    finally:
        report = _report(folder / REPORT)
        if report is not None and config.report_file:
            _copy_report(report, config.report_file)
    # A program that ignores SIGCHLD learns no exit code.
    return EndedJob(code or (report.exit_code if report is not None else 0), report)


def _exit_code(folder: Path, environ: Mapping[str, str], timing: Timing) -> int:
    """Return the agent's exit code; an exception raised here ends the agent first."""
    with CalledAgent(folder, environ) as agent:
        try:
            code = agent.wait()
        except BaseException as error:
            timeout_s = timing.drain_timeout_s + timing.shutdown_timeout_s + _STOP_MARGIN_S
            agent.stop(signal_of(error), timeout_s)
            raise
    assert code is not None, "without a timeout it waits for the end"
    return code


def _report(path: Path) -> FinalReport | None:
    try:
        return read_report(str(path))
    except (OSError, *UNREADABLE):
        return None


def _copy_report(report: FinalReport, path: str) -> None:
    try:
        write_report(path, report)
    except OSError as error:
        _log.warning("the report of the job cannot be written to %s: %s", path, error)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    prefix = _prefix()
    try:
        base = Path(tempfile.gettempdir())
        _sweep(base, prefix)
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
    except OSError as error:
        base = Path(tempfile.tempdir or environment.snapshot().get("TMPDIR") or "/tmp")
        raise no_room(base, "a folder for the function", error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    """Return the prefix of this user's folders, valid where a pid means the same process.

    A pid differs on another host with the same temporary folder, and in another container.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    space = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    return f"{_PREFIX}-{os.getuid()}-{boot}-{space}-"


def _sweep(base: Path, prefix: str) -> None:
    """Remove the folders of this user's callers that were killed."""
    for folder in base.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not process_start(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
