"""Turns the failure of a call into an error: from the agent's report, or from its absence."""

from __future__ import annotations

import signal
from typing import Any

from elastane.errors import (
    ConfigurationError,
    ElastaneError,
    ExitCode,
    JobClosedError,
    JoinTimeoutError,
    MembershipError,
    NodeUnfitError,
    WorkerFailedError,
)
from elastane.observe.report import FinalReport, ReportedFailure
from elastane.protocol.diagnosis import headline

_BY_SLUG: dict[str, type[ElastaneError]] = {
    "rdzv-timeout": JoinTimeoutError,
    "rdzv-closed": JobClosedError,
    "job-closed": JobClosedError,
}
_BY_CODE: dict[int, type[ElastaneError]] = {
    ExitCode.TRY_AGAIN: MembershipError,
    ExitCode.CONFIGURATION: ConfigurationError,
    ExitCode.NODE_UNFIT: NodeUnfitError,
}


class FunctionFailedError(WorkerFailedError):
    """A function failed in a worker; `report` is the job's, `trace` the worker's traceback."""

    def __init__(self, what: str, *, report: FinalReport, trace: str, **rest: Any) -> None:
        super().__init__(what, slug="worker-failed", **rest)
        self.report = report
        self.trace = trace

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}" if self.trace else super().__str__()


def error_of(name: str, report: FinalReport | None, code: int) -> ElastaneError:
    """Return the error of a call whose agent ended with a `code` other than 0."""
    if report is None:
        return agent_lost(name, code)
    if report.root_cause is not None:
        return _of_worker(name, report, report.root_cause)
    kind = _BY_SLUG.get(report.slug) or _BY_CODE.get(code, ElastaneError)
    return kind(
        f"{name}(): {report.cause or report.reason}",
        slug=report.slug or "agent-lost",
        where=_where(report),
        next_step=report.next_step,
    )


def agent_lost(name: str, code: int) -> ElastaneError:
    """Return the error for an agent that ended without a report."""
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    return ElastaneError(
        f"the agent of {name}() ended {how}, and left no report",
        slug="agent-lost",
        expected="an agent that lives as long as its workers; they were ended with it",
        next_step="see its standard error; for SIGKILL, the kernel's log (memory)",
    )


def _of_worker(name: str, report: FinalReport, root: ReportedFailure) -> FunctionFailedError:
    trace = root.message.strip("\n")
    return FunctionFailedError(
        f"{name}() failed on rank {root.rank}: {headline(trace) or root.exit}",
        report=report,
        trace=trace,
        where=f"{_where(report)}, node {root.node}, rank {root.rank} (local rank "
        f"{root.local_rank}, pid {root.pid}), {root.exit}",
        next_step=f"{_advice(name, report)}; logs: {report.log_dir}",
    )


def _advice(name: str, report: FinalReport) -> str:
    """Return the agent's advice in the words of a caller of functions."""
    advice = report.next_step.replace("--max-restarts N", "max_restarts=N")
    return advice.replace("the script", f"{name}()") or "start from that failure"


def _where(report: FinalReport) -> str:
    at = f", round {report.round}, attempt {report.attempt}" if report.round is not None else ""
    return f"job {report.job}{at}"
