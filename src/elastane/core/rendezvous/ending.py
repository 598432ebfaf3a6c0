"""How a job ends: with success, with its restart budget used up, or for want of nodes."""

from __future__ import annotations

from elastane.core.diagnosis import exit_text, root_cause
from elastane.core.messages import Close
from elastane.core.model import Cause, Outcome
from elastane.core.notes import EventKind
from elastane.core.rendezvous.state import Incident, Phase, State
from elastane.core.rendezvous.words import named
from elastane.errors import ExitCode


def success(state: State) -> bool:
    """All workers of the world in force exited with 0."""
    assert state.world is not None
    count = state.world.world_size
    return _close(
        state, Outcome(ok=True, reason=f"all {count} workers of {state.world.fence} succeeded")
    )


def failure(state: State, incident: Incident, why: str) -> bool:
    """Workers failed and may not restart."""
    assert state.world is not None
    cause = root_cause(incident.sightings, state.world.fence)
    assert cause.failure is not None
    return _close(
        state,
        Outcome(
            ok=False,
            reason=f"{cause.what}; {why}",
            slug="worker-failed",
            exit_code=ExitCode.WORKER_FAILED,
            cause=cause,
            next_step=_advice(cause.failure.exit_code, state.budget.allowed),
        ),
    )


def _advice(exit_code: int, allowed: int) -> str:
    if exit_code == -9:
        return "look for an out-of-memory kill: dmesg | grep -i 'killed process'"
    if exit_code < 0:
        return f"after {exit_text(exit_code)}, look for a native stack trace in its stderr log"
    if allowed == 0:
        return "mend the script; to let the job survive such failures: --max-restarts N"
    return "mend the script; the first failure's log has the traceback"


def too_few(state: State, here: int) -> bool:
    """Not enough nodes came within join_timeout."""
    limit_s = state.spec.timing.join_timeout_s
    needed = state.spec.min_nodes
    present = named(state.idle) or "none"
    lost = f"; before: {state.last_incident}" if state.last_incident else ""
    what = (
        f"rendezvous: {here} of at least {needed} nodes joined within {limit_s:g} s"
        f" (present: {present}{lost})"
    )
    return _close(
        state,
        Outcome(
            ok=False,
            reason=what,
            slug="rdzv-timeout",
            exit_code=ExitCode.TRY_AGAIN,
            cause=Cause(kind="timeout", what=what),
            next_step=(
                "start the missing nodes with the same command, or allow fewer by --nnodes MIN:MAX,"
                " or wait longer by --rdzv-conf join_timeout=SECONDS"
            ),
        ),
    )


def _close(state: State, outcome: Outcome) -> bool:
    state.outcome, state.cause = outcome, outcome.cause
    state.incident = None
    state.enter(Phase.CLOSING, outcome.reason)
    state.tell(EventKind.JOB_ENDED, outcome.reason, ok=outcome.ok, exit_code=outcome.exit_code)
    state.persist()
    for node in state.nodes.values():
        state.send(node, Close(outcome))
    return True
