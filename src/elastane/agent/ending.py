"""What an agent writes when its job has ended: the box, the report, and its own error file.

Owns the order of these writes. A failed write never changes how the job ends: a closed console or a
full folder is logged where that is still possible.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from elastane.agent.hang_monitor import UNKILLABLE_SLUG as UNKILLABLE
from elastane.errors import ExitCode
from elastane.observe import logging as say
from elastane.observe.box import render_box
from elastane.observe.report import report_of, write_launcher_error, write_report
from elastane.options.config import AgentConfig
from elastane.process.streams.console import process_console
from elastane.protocol.effects import Exit
from elastane.protocol.model import Outcome

_log = logging.getLogger("elastane.options")
# Set for a launcher that is itself a worker of TorchX, Kubernetes or another launcher.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Set in a pod of an ElasticJob: the file whose text its kubelet puts into the pod's status.
_TERMINATION_LOG = "ELASTANE_TERMINATION_LOG"
# A kubelet takes 4,096 bytes; a condition of an ElasticJob repeats 400 characters.
_TERMINATION_CHARS_MAX = 1000


def report_end(config: AgentConfig, exit_: Exit) -> None:
    """Write the requested files, then print the box of a failed job."""
    _write_files(config, exit_)
    if loss := process_console(1).loss:
        _log.warning("stdout could not be written, and its last output is lost: %s", loss)
    outcome = _outcome(exit_)
    _write_termination_log(config.environment.get(_TERMINATION_LOG, ""), outcome)
    if outcome.ok or (exit_.outcome is None and not outcome.slug):
        return
    show(outcome, _log_dir(config))


def show(outcome: Outcome, log_dir: str) -> None:
    """Print the box after everything that was logged before."""
    say.flush()
    try:
        sys.stderr.write(render_box(outcome, log_dir, sys.stderr.encoding) + "\n")
        sys.stderr.flush()
    except OSError:
        # The console is closed. That must not change how the job ends, nor must Python's last
        # flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _write_files(config: AgentConfig, exit_: Exit) -> None:
    error_file = config.environment.get(_ERROR_FILE, "")
    if not config.report_file and not error_file:
        return
    outcome = _outcome(exit_)
    report = report_of(config.spec.job, outcome, exit_.code, _log_dir(config))
    try:
        if config.report_file:
            write_report(config.report_file, report)
        if error_file and exit_.outcome is not None and not outcome.ok:
            write_launcher_error(error_file, report)
    except OSError as error:
        _log.warning("the report of how the job ended was not written: %s", error)


def _write_termination_log(path: str, outcome: Outcome) -> None:
    """Write in one line why this agent ends, for its pod's status."""
    if not path or outcome.ok:
        return
    text = outcome.reason
    failure = outcome.cause.failure if outcome.cause is not None else None
    if failure is not None and failure.message:
        text += f": {failure.message}"
    line = " ".join(text.split())[:_TERMINATION_CHARS_MAX]
    try:
        # The kubelet has created the file; without it there is no reader.
        with Path(path).open("r+", encoding="utf-8", errors="replace") as file:
            file.write(line + "\n")
            file.truncate()
    except OSError as error:
        _log.info("the pod's status does not say why this agent ends: %s: %s", path, error)


def _outcome(exit_: Exit) -> Outcome:
    """Return the outcome; an agent that leaves a running job has received none."""
    if exit_.outcome is not None:
        return exit_.outcome
    is_unfit = exit_.code == ExitCode.NODE_UNFIT
    return Outcome(
        ok=False,
        reason=exit_.reason,
        slug=UNKILLABLE if is_unfit else "",
        exit_code=exit_.code,
        next_step="another node; this one may need a reboot" if is_unfit else "",
    )


def _log_dir(config: AgentConfig) -> str:
    return str(config.logs.job_dir(config.spec.job)) if config.logs.has_files else ""
