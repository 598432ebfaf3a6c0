"""Translates the end of a launch in this process to the outcome and exit code of `elastane run`.

Exceptions of a rendezvous are recognized by their class names: a handler written for torch raises
torch's.
"""

from __future__ import annotations

import socket
import time

import msgspec

from elastane.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from elastane.errors import ElastaneError, ExitCode
from elastane.protocol.diagnosis import Sighting, failures_in_order, root_cause
from elastane.protocol.model import Failure, Fence, Outcome

_NS = 1_000_000_000
_CODES = {
    "RendezvousTimeoutError": ExitCode.TRY_AGAIN,
    "RendezvousConnectionError": ExitCode.TRY_AGAIN,
    "RendezvousClosedError": ExitCode.CONFIGURATION,
    "RendezvousError": ExitCode.TRY_AGAIN,
}


def exit_code_of(error: Exception) -> int | None:
    """Return the exit code for an error of a rendezvous, None for any other error."""
    if isinstance(error, ElastaneError):
        return None
    for kind in type(error).__mro__:
        if kind.__name__ in _CODES:
            return int(_CODES[kind.__name__])
    return None


def outcome_of(error: ChildFailedError, max_restarts: int) -> Outcome:
    """Return the outcome of workers that failed for good, with their root cause on this node."""
    now_s, host = time.time(), socket.gethostname()
    sightings = [
        Sighting(node_id=host, at_s=failure.time_ns / _NS, failure=_failure(rank, failure, now_s))
        for rank, failure in error.failures.items()
    ]
    reason = "no restarts are allowed (--max-restarts 0)"
    if max_restarts:
        reason = f"all {max_restarts} restarts of this node are used (--max-restarts)"
    return Outcome(
        ok=False,
        reason=reason,
        slug="worker-failed",
        exit_code=int(ExitCode.WORKER_FAILED),
        # A handler does not expose the numbers of its rounds.
        cause=msgspec.structs.replace(root_cause(sightings, Fence(0, 0)), fence=None),
        failures=failures_in_order(sightings, now_s),
    )


def _failure(rank: int, failure: ProcessFailure, now_s: float) -> Failure:
    has_file = bool(failure.error_file) and failure.error_file != "<N/A>"
    return Failure(
        local_rank=failure.local_rank,
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        age_s=max(0.0, now_s - failure.time_ns / _NS),
        message=_message(failure) if has_file else "",
        error_file=failure.error_file if has_file else "",
    )


def _message(failure: ProcessFailure) -> str:
    if not isinstance(failure.message, dict):
        return str(failure.message)
    extra = failure.message.get("extraInfo") or {}
    return str(extra.get("py_callstack") or failure.message.get("message", ""))
