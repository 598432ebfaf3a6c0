"""Which of an incident's failures is its cause, and which are its consequences.

Every failure arrives with an age by its sender's monotonic clock, so all of a job's failures
stand on the coordinator's one time line; the earliest one is the cause. A worker that only lost
the connection to a peer is a consequence as long as anything else explains it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from elastane.core.limits import FAILURE_TOLD_CHARS_MAX, FAILURES_TOLD_MAX, FAILURES_TOLD_WHOLE
from elastane.core.model import Cause, FailedWorker, Failure, Fence

# What gloo and NCCL say when a peer is gone (torch 2.13); compared in lower case.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "read timeout",
    "timed out waiting",
)
_TRACEBACK = "Traceback (most recent call last):"
_OWN_ERRORS = "elastane.errors."


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A failure with its node and its time on the coordinator's clock."""

    node_id: str
    at_s: float
    failure: Failure


def is_lost_peer(failure: Failure) -> bool:
    """Whether the failure says no more than that a peer was gone."""
    text = failure.message.lower()
    return any(sign in text for sign in _LOST_PEER)


def headline(said: str) -> str:
    """Return the line of a worker's words that names its error, the last one where none does.

    An exception's own text may have several lines: the one after the stack names it.
    """
    *_, last = said.rpartition(_TRACEBACK)
    lines = [line for line in last.splitlines() if line.strip()]
    if _TRACEBACK in said or said.startswith(_OWN_ERRORS):
        lines = [line for line in lines if not line[0].isspace()][:1] or lines
    return lines[-1].strip() if lines else ""


def exit_text(exit_code: int) -> str:
    """Return in words how a process with this exit code ended (negative: by a signal)."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return name


def failure_text(failure: Failure) -> str:
    """Return in words how a worker ended, with what its agent knows besides."""
    evidence = f" ({failure.evidence})" if failure.evidence else ""
    return exit_text(failure.exit_code) + evidence


def told(sightings: Sequence[Sighting], now_s: float) -> tuple[FailedWorker, ...]:
    """Return an incident's failures in the order of time, bounded, with their ages as of now."""
    found = []
    for place, one in enumerate(sorted(sightings, key=_place)[:FAILURES_TOLD_MAX]):
        message = one.failure.message
        if place >= FAILURES_TOLD_WHOLE:
            message = message[-FAILURE_TOLD_CHARS_MAX:]
        failure = msgspec.structs.replace(
            one.failure, age_s=max(0.0, now_s - one.at_s), message=message
        )
        found.append(FailedWorker(node_id=one.node_id, failure=failure))
    return tuple(found)


def _place(sighting: Sighting) -> tuple[float, int]:
    return sighting.at_s, sighting.failure.rank


def root_cause(sightings: Sequence[Sighting], fence: Fence) -> Cause:
    """Return the earliest failure that is not explained by a lost peer; needs one at least."""
    own = [s for s in sightings if not is_lost_peer(s.failure)] or list(sightings)
    first = min(own, key=_place)
    failure = first.failure
    words = headline(failure.message)[:200]
    said = f": {words}" if words else ""
    return Cause(
        kind="worker",
        what=(
            f"worker of rank {failure.rank} (local rank {failure.local_rank}, pid {failure.pid})"
            f" on node {first.node_id} ended with {exit_text(failure.exit_code)}{said}"
        ),
        node_id=first.node_id,
        fence=fence,
        failure=failure,
        consequences=len(sightings) - 1,
    )
