"""One call of a function as a job: its folder, its agent, its end.

Owns the private folder that caller, agent and workers share, and that nothing is left of it. A
caller that was killed leaves its folder behind: the next call removes it. How it fails: errors of
the launcher before anything starts; afterwards what happened is returned, not raised.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from elastane.functions.agent import CalledAgent
from elastane.functions.payload import collect, no_room, write_files
from elastane.functions.wish import FILE, REPORT, Wish
from elastane.launcher.build import build
from elastane.observe.report import JobReport, read_report
from elastane.runtime.files import process_start

_PREFIX = "elastane-call"
# Beyond its bounds on checkpoints and on SIGTERM: the agent's own way out.
_STOP_MARGIN_S = 10.0
# The workers want the interpreter that pickled the function; the caller's own error file is its
# own, also where it is a worker and takes the failure calmly.
_NOT_HANDED_ON = ("PYTHON_EXEC", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class Ended:
    """How a job ended: the agent's exit code, its report, and by rank what was returned here."""

    code: int
    report: JobReport | None
    values: dict[int, Any] = field(default_factory=dict)


def run_function(
    wish: Wish, files: Mapping[str, bytes], environ: Mapping[str, str], name: str
) -> Ended:
    """Run the packed function `files` as a job; blocks until it ends."""
    with _folder() as folder:
        write_files(folder, files)
        values = {**wish.values, "module": "1"}
        ended = _run(folder, replace(wish, values=values, script_args=(str(folder),)), environ)
        return replace(ended, values=collect(folder, name)) if ended.code == 0 else ended


def run_command(wish: Wish, environ: Mapping[str, str]) -> Ended:
    """Run what the wish names as a job; blocks until it ends."""
    with _folder() as folder:
        return _run(folder, wish, environ)


def _run(folder: Path, wish: Wish, environ: Mapping[str, str]) -> Ended:
    environ = {key: value for key, value in environ.items() if key not in _NOT_HANDED_ON}
    report = Path(wish.values.get("report_file") or folder / REPORT)
    wish = replace(wish, values={**wish.values, "report_file": str(report)})
    config = build(wish.options(environ), environ)
    timing = config.spec.timing
    write_files(folder, {FILE: wish.to_json()})
    with CalledAgent(folder, environ) as agent:
        try:
            code = agent.wait()
        except BaseException as error:
            patience_s = timing.drain_timeout_s + timing.shutdown_timeout_s + _STOP_MARGIN_S
            agent.stop(_signal_of(error), patience_s)
            raise
    assert code is not None, "without a timeout it waits for the end"
    return Ended(code, _report(report))


def _signal_of(error: BaseException) -> int:
    """Return what the agent is to get: the signal that came here, else the one that means: end."""
    default = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
    return int(getattr(error, "sigval", default))


def _report(path: Path) -> JobReport | None:
    try:
        return read_report(str(path))
    except (OSError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    base = Path(tempfile.gettempdir())
    # A pid of another container means nothing here, nor ours there.
    space = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    prefix = f"{_PREFIX}-{os.getuid()}-{space}-"
    _sweep(base, prefix)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
    except OSError as error:
        raise no_room(base, "a folder for the function", error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path, prefix: str) -> None:
    """Remove the folders of this user's callers that were killed."""
    for folder in base.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not process_start(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
