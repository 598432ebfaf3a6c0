"""Which of an incident's failures is its cause, and which are its consequences.

Every failure arrives with an age by its sender's monotonic clock, so all of a job's failures
stand on the coordinator's one time line; the earliest one is the cause. A worker that only lost
the connection to a peer is a consequence as long as anything else explains it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from elastane.core.model import Cause, Failure, Fence

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


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A failure with its node and its time on the coordinator's clock."""

    node_id: str
    at_s: float
    failure: Failure


def is_lost_peer(failure: Failure) -> bool:
    """Whether the failure says no more than that a peer was gone."""
    text = failure.message.lower()
    return any(sign in text for sign in _LOST_PEER)


def exit_text(exit_code: int) -> str:
    """Return in words how a process with this exit code ended (negative: by a signal)."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (killed from outside, or out of memory)" if exit_code == -signal.SIGKILL else ""
    return f"{name}{hint}"


def root_cause(sightings: Sequence[Sighting], fence: Fence) -> Cause:
    """Return the earliest failure that is not explained by a lost peer; needs one at least."""
    own = [s for s in sightings if not is_lost_peer(s.failure)] or list(sightings)
    first = min(own, key=lambda s: (s.at_s, s.failure.rank))
    failure = first.failure
    last_words = failure.message.strip().splitlines()[-1:] if failure.message.strip() else []
    said = f": {last_words[0][:200]}" if last_words else ""
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
