"""How a job ends: with success, by its restart budget, for lack of nodes, or on request.

Each ending makes the outcome durable before any agent receives it. `charge` is here too: an
incident that the budget cannot pay for is an ending.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from elastane.coordinator.rules.incident import (
    Blame,
    BudgetVerdict,
    EndedWorld,
    Incident,
    PastIncident,
)
from elastane.coordinator.rules.nodes import named
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.errors import ExitCode
from elastane.protocol.diagnosis import (
    Sighting,
    after_mismatch,
    after_wait,
    crash_site,
    crash_sites,
    exit_text,
    failure_text,
    failures_in_order,
    find_mismatch,
    headline,
    is_from_outside,
    known_end,
    own_next_step,
    refusal,
    root_cause,
    says_mismatch,
    says_other_program,
    without_noise,
)
from elastane.protocol.limits import VERDICT_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Close
from elastane.protocol.model import NO_RANK, Cause, Crash, Failure, Fence, Outcome
from elastane.protocol.patterns import DISK_FULL, MISSING_FILE
from elastane.protocol.ring import WorkerCalls
from elastane.protocol.verdicts import Verdict, culprit_data

# A failure sooner after a restart may follow from the failure before it.
_SOON_S = 60.0


def success(state: State) -> bool:
    """End the job: all workers of the current world exited with 0."""
    assert state.world is not None
    count, fence = state.world.world_size, state.world.fence
    _log_last_steps(state, count)
    who = f"all {count} workers" if count > 1 else "the worker"
    return _close(state, Outcome(ok=True, reason=f"{who} of {fence} succeeded", fence=fence))


def _log_last_steps(state: State, world_size: int) -> None:
    """Log the steps that the world had made at its end, which came after the last count."""
    made = [node.progress.steps for node in state.roster.members()]
    known = [steps for steps in made if steps is not None]
    if known and len(known) == len(made) and state.progress.note(state.now_s, min(known)):
        steps = min(known)
        data = {"steps": steps, "workers": world_size, "age_s": 0.0}
        state.log(EventKind.PROGRESS, f"step {steps}", **data)


def failure(state: State, incident: Incident, why: str) -> bool:
    """End the job: workers failed and may not restart."""
    assert state.world is not None
    note_mismatch(state, incident, is_over=True)
    cause = _root_cause(state, incident, state.world.fence)
    assert cause.failure is not None
    before = _before(state, incident, cause)
    advice = _advice(cause, cause.failure, state.budget.allowed)
    clue = known_end(cause.failure)
    if before.disk_was_full and (clue is None or clue.kind == MISSING_FILE.kind):
        advice = f"{DISK_FULL.next_step}; then remove what is incomplete, such as a checkpoint"
    return _close(
        state,
        Outcome(
            ok=False,
            reason=f"{cause.what}; {why}",
            slug="worker-failed",
            exit_code=ExitCode.WORKER_FAILED,
            cause=cause,
            next_step=advice,
            failures=failures_in_order(_sightings(state, incident, cause), state.now_s),
            fence=state.world.fence,
            before=before.text,
        ),
    )


def _root_cause(state: State, incident: Incident, fence: Fence) -> Cause:
    """Return the root cause: of workers that ask for a restart, that of the earlier incident."""
    returned = state.incidents.returned if incident is state.incidents.current else ()
    cause = root_cause(incident.sightings, fence, returned, incident.calls)
    if incident.wait is not None:
        cause = after_wait(cause, incident.wait, incident.sightings)
    earlier = _explanation(state, incident)
    if earlier is None:
        return cause
    if not earlier.sightings or _differ(incident):
        blame = earlier.blame or _blame(find_mismatch(earlier.sightings, earlier.calls))
        if blame is not None:
            return after_mismatch(cause, blame.sentence, blame.worker, incident.sightings)
        return msgspec.structs.replace(cause, what=f"{earlier.reason}; so {cause.what}")
    first = root_cause(earlier.sightings, earlier.fence)
    return msgspec.structs.replace(
        first,
        what=f"{first.what}; so {cause.what}",
        consequences=first.consequences + len(incident.sightings),
    )


def _blame(found: Verdict | None) -> Blame | None:
    return None if found is None else Blame(found.sentence, found.worker)


def _differ(incident: Incident) -> bool:
    """Whether workers ask for a restart since their programs differ, which no loss explains."""
    return any(says_other_program(one.failure) for one in incident.sightings)


def _explanation(state: State, incident: Incident) -> EndedWorld | None:
    """Return why workers ask for a restart; None if they do not."""
    return state.incidents.explains if incident.only_asks_restart else None


def _sightings(state: State, incident: Incident, cause: Cause) -> tuple[Sighting, ...]:
    """Return the failures of an incident, and of the one for which workers ask for a restart.

    A program that returned, so that the others failed, counts as one of them. So does a worker that
    is the cause and had not failed.
    """
    earlier = _explanation(state, incident)
    left = _return_of(state, incident)
    return (
        *(() if earlier is None else earlier.sightings),
        *(() if left is None else (left,)),
        *_living(incident, cause),
        *incident.sightings,
    )


def _living(incident: Incident, cause: Cause) -> tuple[Sighting, ...]:
    if cause.failure is None or not cause.failure.lives:
        return ()
    at_s = min(one.at_s for one in incident.sightings)
    return (Sighting(node_id=cause.node_id, at_s=at_s, failure=cause.failure),)


def _return_of(state: State, incident: Incident) -> Sighting | None:
    return state.incidents.find_return() if incident is state.incidents.current else None


def _before(state: State, incident: Incident, cause: Cause) -> PastIncident:
    """Return the incident that began this world, if its workers failed soon after that.

    If they failed by the same error several times, it is the last one with another error.
    """
    lived_s = incident.at_s - state.worlds.began_s
    if incident.only_asks_restart or lived_s >= max(state.spec.timing.crash_loop_s, _SOON_S):
        return PastIncident()  # In the first case the root cause begins with it.
    last = state.incidents.last
    is_same = bool(last.error) and _past(cause, "").error == last.error
    return state.incidents.before if is_same else last


def _past(cause: Cause, note: str) -> PastIncident:
    """Return what is remembered of an incident with this cause."""
    if cause.failure is None:
        return PastIncident(cause.what + note)
    error = without_noise(headline(cause.failure.message))
    clue = known_end(cause.failure)
    is_full = clue is not None and clue.kind == DISK_FULL.kind
    return PastIncident(cause.what + note, error, is_full)


def note_mismatch(state: State, incident: Incident, *, is_over: bool = False) -> None:
    """Log once which rank called another collective than the others, if gloo ended one for that.

    `is_over`: no further failures of the incident come, so equal sides stay equal.
    """
    found = None if incident.has_mismatch else find_mismatch(incident.sightings, incident.calls)
    if found is None or not (found.ranks or is_over):
        return
    incident.note_mismatch()
    state.log(EventKind.CULPRIT, found.sentence, **culprit_data(found, 0.0))


def compare_calls(state: State, node_id: str, fence: Fence, calls: tuple[WorkerCalls, ...]) -> None:
    """Compare the last collectives of a node's workers in the world of `fence` with the others.

    Survivors enter the next world at once, so the answers of their agents may come after its start.
    """
    incident, ended = state.incidents.current, state.incidents.explains
    if incident is not None and state.world is not None and state.world.fence == fence:
        incident.note_calls(node_id, calls)
        note_mismatch(state, incident)
    elif ended is not None and ended.fence == fence:
        ended.calls[node_id] = calls
        found = None if ended.has_mismatch else find_mismatch(ended.sightings, ended.calls)
        if found is not None and found.ranks:
            state.incidents.note_mismatch()
            data = culprit_data(found, 0.0)
            state.log_of(fence, EventKind.CULPRIT, found.sentence, **data)


def verdict_pending(state: State, incident: Incident) -> bool:
    """Whether to wait for evidence of a departure before failures end the job."""
    due_s = incident.at_s + VERDICT_S
    pending = state.budget.used >= state.budget.allowed and state.now_s < due_s
    if pending:
        state.queue.wait_until(due_s)
    return pending


def charge(
    state: State,
    incident: Incident,
    kind: EventKind = EventKind.RESTART,
    *,
    retries_step: bool = True,
) -> BudgetVerdict:
    """Charge an incident to the budget if it allows one more, and log the cause.

    `kind` is REPLACEMENT if only the lost workers are replaced and the others continue.
    `retries_step`: the next world makes the step that failed again, with the same data.
    """
    assert state.world is not None
    note_mismatch(state, incident, is_over=True)
    if incident is state.incidents.current:
        state.incidents.explain_by_return()
    cause = _root_cause(state, incident, state.world.fence)
    crash, refused, has_retried = None, "", retries_step
    if cause.failure is not None:
        crash = _crash(state, incident, cause, kind, retries_step=retries_step)
        refused = refusal(cause.failure) if kind is EventKind.RESTART else ""
        # Several failures of one world are one attempt, and a worker without a place made none. The
        # end of a worker may be reported in a later world, since its process ends slowly.
        met = cause.failure.met
        tried = state.world.fence.round if kind is EventKind.RESTART and not met else met
        is_new = tried == state.world.fence.round or tried > state.budget.last_met
        has_retried = retries_step and is_new
    lived_s = incident.at_s - state.worlds.began_s
    # A world may be charged for several incidents of workers without a place, which do not end it.
    is_of_world = incident is state.incidents.current
    if is_of_world and not retries_step:
        state.incidents.note_crash(crash)
    verdict = state.budget.find_charge(state.world.fence) if is_of_world else None
    verdict = verdict or state.budget.charge(
        lived_s, state.spec.timing, crash, refused, has_retried=has_retried
    )
    note = "" if kind is EventKind.REPLACEMENT else f"; {verdict.reason}"
    state.incidents.explain(incident, _past(cause, note))
    if verdict.restart:
        incident.charge()
        if is_of_world:
            state.budget.charged = state.world.fence
        budget, reason = state.budget, verdict.reason
        if cause.failure is not None and cause.failure.exit_code == 0 and not cause.is_mismatch:
            reason = f"{reason}: {incident.reason}"  # The log has named another worker so far.
        if incident.why_stopped:
            reason = f"{reason}: {incident.why_stopped}"
        if kind is EventKind.REPLACEMENT:
            reason = (
                "lost workers are replaced, the others continue:"
                f" {budget.used} of {budget.allowed} restarts of the budget used{verdict.pause}"
            )
        counts = {"used": budget.used, "allowed": budget.allowed}
        state.log(kind, reason, **counts, **cause_data(cause))
        state.persist()
    return verdict


def record_free_restart(state: State, incident: Incident) -> str:
    """Record that all workers restart without a charge; return why they do not, or "".

    A crash whose replacement was charged may be why: then the attempt counts as failed by it.
    """
    assert state.world is not None
    earlier = _explanation(state, incident)
    is_own = incident.charged and incident.own_causes > 0
    is_of_crash = is_own or (earlier is not None and bool(earlier.sightings))
    crash = state.incidents.crash if is_of_crash else None
    use, lived_s = state.incidents.use_by(_nodes(state)), incident.at_s - state.worlds.began_s
    return state.budget.note_free_restart(use, lived_s, state.spec.timing, crash)


def _nodes(state: State) -> tuple[str, ...]:
    """Return the nodes of this attempt: a world that has shrunk may lack some of them."""
    assert state.world is not None
    here = {member.node_id for member in state.world.members}
    return tuple(sorted(here | state.incidents.nodes))


def _crash(
    state: State, incident: Incident, cause: Cause, kind: EventKind, *, retries_step: bool
) -> Crash | None:
    """Return the error of the script that is the cause; None if another attempt may do without.

    Where a lost worker is replaced and the next world retries its step, steps are those of the job,
    no attempt begins from a checkpoint, and the next one may be on any node.
    """
    assert state.world is not None and cause.failure is not None
    own = (crash_site(one.failure) for one in _sightings(state, incident, cause))
    sites = crash_sites(cause.failure, {*own, *state.incidents.crash_sites})
    if not sites:
        return None
    if kind is EventKind.REPLACEMENT and retries_step:
        if not cause.failure.steps:
            return None
        return Crash(sites, (), cause.failure.steps, met=cause.failure.met)
    nodes = _nodes(state)
    steps = cause.failure.steps or cause.failure.measured
    return Crash(sites, nodes, steps, state.incidents.use_by(nodes), cause.failure.met)


def cause_data(cause: Cause | None) -> dict[str, str | int | float | bool]:
    """Return the part of a root cause that the event log keeps."""
    if cause is None or cause.failure is None:
        return {}
    failure = cause.failure
    return {
        "cause": cause.what,
        "cause_node": cause.node_id,
        **({} if failure.rank == NO_RANK else {"cause_rank": failure.rank}),
        "cause_local_rank": failure.local_rank,
        "cause_pid": failure.pid,
        "cause_exit": failure_text(failure),
        "cause_log": failure.log_file,
        "consequences": cause.consequences,
        "alike": cause.alike,
    }


_SAME_CALLS = "let all ranks call the same collectives in the same order, with equal sizes"


def _advice(cause: Cause, failure: Failure, allowed: int) -> str:
    if cause.is_mismatch or says_other_program(failure):
        return _SAME_CALLS
    if says_mismatch(failure):
        return f"{_SAME_CALLS}; TORCH_DISTRIBUTED_DEBUG=DETAIL names the first that differs"
    if failure.exit_code == 0:
        stacks = f"see by elastane explain, from its stacks, what rank {failure.rank} did meanwhile"
        same = "let all ranks make the same number of steps, or end together"
        return stacks if failure.lives else same
    clue = known_end(failure)
    known = own_next_step(failure) or (clue and clue.next_step)
    if known:
        return known
    if is_from_outside(failure):
        kernel = ", or the kernel (dmesg | grep -i killed)" if failure.exit_code == -9 else ""
        return f"find who sent {exit_text(failure.exit_code)}: a scheduler, a person{kernel}"
    if failure.exit_code < 0 and not failure.error_file:  # no exception of the script's
        return "read the stacks of all threads above, or at the end of its stderr"
    if allowed == 0:
        return "mend the script; to let the job survive such failures: --max-restarts N"
    return "mend the script; the first failure's log has the traceback"


def conclude(state: State, node_id: str, ok: bool, reason: str) -> None:
    """Record that the user of `node_id` ends the job; the first request counts."""
    state.ending.request(
        Outcome(
            ok=ok,
            reason=f"node {node_id} closed the job: {reason}",
            slug="rdzv-closed",
            exit_code=ExitCode.DONE if ok else ExitCode.WORKER_FAILED,
            cause=Cause(kind="request", what=reason, node_id=node_id),
            next_step="start a new job under another id",
        )
    )


def concluded(state: State) -> bool:
    """End the job if an agent requested it and nothing else has ended it."""
    if state.ending.requested is None or state.ending.outcome is not None:
        return False
    return _close(state, state.ending.requested)


MISSING_NODES = "start the missing nodes with the same command, or allow fewer by --nnodes MIN:MAX"
MISSING_WORKERS = (
    "find in the logs why the replacements did not start, or allow fewer by --min-workers N"
)


def too_few(
    state: State, what: str, nodes: Collection[str], limit_s: float, next_step: str
) -> bool:
    """End the job: of `what`, too few came within `limit_s`; `nodes` are present."""
    setting = "join" if limit_s == state.spec.timing.join_timeout_s else "rejoin"
    last = state.incidents.last_reason
    lost = f"; before: {last}" if last else ""
    present = named(nodes) or "none"
    reason = f"rendezvous: {what} within {limit_s:g} s (present: {present}{lost})"
    return _close(
        state,
        Outcome(
            ok=False,
            reason=reason,
            slug="rdzv-timeout",
            exit_code=ExitCode.TRY_AGAIN,
            cause=Cause(kind="timeout", what=reason),
            next_step=f"{next_step}, or wait longer by --rdzv-conf {setting}_timeout=SECONDS",
        ),
    )


def no_replica(state: State) -> bool:
    """End the job: one replica of its sharded state needs more nodes than the job may have."""
    what = (
        f"a replica of the sharded state is of {state.in_place.nodes_per_replica} nodes, and the"
        f" job has {state.spec.max_nodes} at most"
    )
    return _close(
        state,
        Outcome(
            ok=False,
            reason=what,
            slug="job-mesh",
            exit_code=ExitCode.CONFIGURATION,
            cause=Cause(kind="configuration", what=what),
            next_step="job.device_mesh(shard=S) with an S of at most all workers of the job, or"
            " more nodes: --nnodes",
            fence=state.world.fence if state.world else None,
        ),
    )


def stalled(state: State) -> bool:
    """End the job: each of several worlds in a row stalled without a step."""
    count, incident = state.incidents.stalls.in_a_row, state.incidents.current
    assert incident is not None
    what = f"{count} worlds in a row made no step; in the last one {incident.reason}"
    return _close(
        state,
        Outcome(
            ok=False,
            reason=what,
            slug="world-stalled",
            exit_code=ExitCode.TRY_AGAIN,
            cause=Cause(kind="timeout", what=what),
            next_step=(
                "let the nodes connect to one another on all TCP ports (a firewall, a wrong network"
                " card: --local-addr, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); check that all"
                " workers call the same collectives in the same order"
            ),
            fence=state.world.fence if state.world else None,
        ),
    )


def _close(state: State, outcome: Outcome) -> bool:
    outcome = msgspec.structs.replace(outcome, restarts_used=state.budget.used)
    state.ending.close(outcome)
    state.incidents.drop()
    state.enter(MembershipPhase.CLOSING, outcome.reason)
    data = {"ok": outcome.ok, "exit_code": outcome.exit_code, **cause_data(outcome.cause)}
    if outcome.next_step:
        data["next_step"] = outcome.next_step
    state.log(EventKind.JOB_ENDED, outcome.reason, **data)
    state.persist()
    for node in state.roster.nodes.values():
        state.queue.send(node, Close(outcome))
    return True
