"""The outcome of a job for programs: a JSON report, and torch's error file of the launcher.

This module owns the form of the report (docs/report.md) and writes it atomically. Every agent of a
job writes the same verdict. A report that cannot be written is an error on stderr and does not
change the job's outcome.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from elastane.process.errorfile import read_error_file, with_error_code, write_content
from elastane.process.files import write_atomic
from elastane.protocol.diagnosis import LIVES, evidence_text, exit_text
from elastane.protocol.model import Failure, Outcome

_NS = 1_000_000_000


class ReportedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's end. `time_ns`: this host's wall clock. `exit_code`: -N for signal N."""

    node: str
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    exit: str
    time_ns: int
    evidence: str = ""
    message: str = ""
    error_file: str = ""
    log_file: str = ""


class FinalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a job as one agent received it. `failures` are in the order of time, bounded.

    `root_cause` is one of them if workers failed. `consequences` counts the later failures of the
    same incident, `alike` those with the same error.
    """

    job: str
    ok: bool
    exit_code: int
    reason: str
    slug: str = ""
    next_step: str = ""
    round: int | None = None
    attempt: int | None = None
    cause: str = ""
    root_cause: ReportedFailure | None = None
    consequences: int = 0
    alike: int = 0
    failures: list[ReportedFailure] = []
    restarts_used: int = 0
    log_dir: str = ""
    version: int = 1


def report_of(job: str, outcome: Outcome, exit_code: int, log_dir: str) -> FinalReport:
    """Return the report of an outcome, with times relative to now."""
    now_ns = time.time_ns()
    cause = outcome.cause
    failures = [_reported(f.node_id, f.failure, now_ns) for f in outcome.failures]
    root = cause.failure if cause is not None else None
    return FinalReport(
        job=job,
        ok=outcome.ok,
        exit_code=exit_code,
        reason=outcome.reason,
        slug=outcome.slug,
        next_step=outcome.next_step,
        round=outcome.fence.round if outcome.fence else None,
        attempt=outcome.fence.attempt if outcome.fence else None,
        cause=cause.what if cause else "",
        root_cause=_root(cause.node_id, root, failures, now_ns) if cause and root else None,
        consequences=cause.consequences if cause else 0,
        alike=cause.alike if cause else 0,
        failures=failures,
        restarts_used=outcome.restarts_used,
        log_dir=log_dir,
    )


def write_report(path: str, report: FinalReport) -> None:
    """Write the report; raises OSError."""
    write_atomic(Path(path), msgspec.json.format(msgspec.json.encode(report)) + b"\n", mode=0o644)


def read_report(path: str) -> FinalReport:
    """Return a report; raises OSError, or one of UNREADABLE for another format."""
    return msgspec.json.decode(Path(path).read_bytes(), type=FinalReport)


def write_launcher_error(path: str, report: FinalReport) -> None:
    """Write the launcher's own error file: its root cause's, with the exit code; raises OSError.

    torchrun does the same if TORCHELASTIC_ERROR_FILE is set for the launcher itself.
    """
    root = report.root_cause
    found = read_error_file(root.error_file) if root is not None and root.error_file else None
    content: dict[str, Any] = dict(found.raw) if found is not None else _error_content(report)
    # A program that returned too early is a root cause with exit code 0.
    code = 0 if root is None else root.exit_code or report.exit_code
    write_content(path, with_error_code(content, code) if root is not None else content)


def _error_content(report: FinalReport) -> dict[str, Any]:
    root = report.root_cause
    time_ns = root.time_ns if root is not None else time.time_ns()
    extra = {
        "py_callstack": root.message if root is not None else "",
        "timestamp": str(time_ns // _NS),
        "timestamp_ns": str(time_ns),
    }
    return {"message": {"message": report.cause or report.reason, "extraInfo": extra}}


def _root(
    node_id: str, failure: Failure, failures: list[ReportedFailure], now_ns: int
) -> ReportedFailure:
    """Return the root cause from the list of failures, since only the list has its time."""
    for one in failures:
        if (one.node, one.rank, one.pid) == (node_id, failure.rank, failure.pid):
            return one
    return _reported(node_id, failure, now_ns)


def _reported(node_id: str, failure: Failure, now_ns: int) -> ReportedFailure:
    return ReportedFailure(
        node=node_id,
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exit_code,
        exit=LIVES if failure.lives else exit_text(failure.exit_code),
        time_ns=now_ns - int(failure.age_s * _NS),
        evidence=evidence_text(failure),
        message=failure.message,
        error_file=failure.error_file,
        log_file=failure.log_file,
    )
