"""What agents report in their sessions, recorded as facts.

A message about another fence than that of the node's workers came late and is ignored. Nothing here
decides; the return value says whether a rule may now decide otherwise.
"""

from __future__ import annotations

import math

from elastane.coordinator.rules import cuts, ending, growth, liveness, recovery, stragglers
from elastane.coordinator.rules.nodes import KnownNode, Place
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.diagnosis import (
    TO_RESTART,
    asks_restart,
    end_text,
    exit_text,
    is_lost_peer,
    is_state_lost,
    worker_text,
)
from elastane.protocol.effects import Send
from elastane.protocol.limits import LEAVE_MARGIN_S, REASON_CHARS_MAX
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    Alive,
    AwaitedWorker,
    Checkpointed,
    Conclude,
    Drained,
    Failed,
    Heartbeat,
    LastCalls,
    Leave,
    Lost,
    Marked,
    Ready,
    Returned,
    StandstillReport,
    Stopped,
    Succeeded,
    ToCoordinator,
)
from elastane.protocol.model import Failure, World


def record_message(state: State, session: int, message: ToCoordinator) -> bool:
    """Record what `message` says; return whether a rule may now decide otherwise."""
    node_id = state.roster.by_session.get(session)
    if node_id is None:
        _keep_for_contest(state, session, message)
        return False
    node = state.roster.nodes[node_id]
    node.connection.hear(state.now_s)
    match message:
        case Heartbeat():
            state.queue.send(node, Alive(state.term.has_authority, cuts.probes(state, node)))
            return _beat(state, node, message)
        case Ready():
            _ready(state, node)
        case Leave() | Conclude():
            _record_request(state, node, message)
        case Failed(fence=fence, failures=failures) if node.is_of(fence) and node.is_current:
            record_failures(state, node, failures)
        case Returned() | Succeeded() if message.fence == node.fence:
            _record_success(state, node, message)
        case Marked() | Drained() if message.fence == node.fence:
            _drained(state, node, message)
        case Able() | Lost() | Checkpointed() | StandstillReport() | AwaitedWorker() | LastCalls():
            _record_workers(state, node, message)
        case Stopped():
            _stopped(state, node, message)
            node.renew_offer(message.offer)
        case _:
            return False
    state.roster.reindex(node)
    return True


def _record_success(state: State, node: KnownNode, message: Returned | Succeeded) -> None:
    """Record that a worker, or all workers of a node, exited with code 0."""
    if isinstance(message, Returned):
        if node.is_member and 0 <= message.end.local_rank < node.spec.local_world_size:
            state.incidents.note_return(node.id, message.end, state.now_s)
    elif node.workers.state == "running":
        node.workers.succeed()
        node.progress.record_last_steps(state.now_s, message.steps)


def _beat(state: State, node: KnownNode, message: Heartbeat) -> bool:
    """Record a heartbeat; return whether a rule has to look at it."""
    node.progress.record_steps(state.now_s, message.progress)
    node.progress.record_copies(state.now_s, message.copies)
    node.progress.record_paces(state.now_s, message, is_of_now=message.fence == node.fence)
    _log_progress(state)
    if state.phase is MembershipPhase.RUNNING:
        stragglers.find_stragglers(state)
    news = cuts.record_probes(state, node, message.probed)
    news |= state.holders.record_heartbeat(node, message, state.world)
    is_new = node.progress.record_waiting(message, is_of_now=message.fence == node.fence)
    if is_new:
        state.roster.reindex(node)
    return recovery.log_shrunk(state) or is_new or news or node.id in state.roster.contests


def _log_progress(state: State) -> None:
    """Log how many steps the whole world has made, or measured, at intervals."""
    if state.world is None or not state.progress.is_due(state.now_s):
        return
    members = [node.progress for node in state.roster.members()]
    made = [each.steps for each in members if each.steps is not None]
    if not made:
        counts = {pace.rank: pace.step for each in members for pace in each.paces}
        moved_s = max((each.measured.last_s for each in members), default=state.now_s)
        _log_pace(state, state.world, counts, round(max(0.0, state.now_s - moved_s), 3))
    elif len(made) == len(members) and state.progress.note(state.now_s, min(made)):
        size = state.world.world_size
        moved_s = max(each.pace.last_s for each in members)
        data = {"steps": min(made), "workers": size, "age_s": round(state.now_s - moved_s, 3)}
        state.log(EventKind.PROGRESS, f"step {min(made)}", **data)
        state.incidents.standstill.move(moved_s)


def _log_pace(state: State, world: World, counts: dict[int, int], age_s: float) -> None:
    """Log the measured step rate of a script that reports no steps; the last is `age_s` old."""
    if len(counts) != world.world_size:
        return
    counted = state.progress.count(state.now_s, world.fence, counts)
    if counted is not None:
        made, before, took_s = counted
        words = f"{made / took_s:.3g} steps/s, as the workers measure them"
        data = {"made": made, "before": before, "seconds": round(took_s, 3)}
        data["workers"] = world.world_size
        state.log(EventKind.PACE, words, **data, age_s=age_s)
        state.incidents.standstill.move(state.now_s - age_s)


def _drained(state: State, node: KnownNode, message: Marked | Drained) -> None:
    if message.drain != state.drain.number:
        return  # of a drain that was called off; its report came late
    if isinstance(message, Marked):
        node.drain.count(message.calls)
    else:
        node.drain.save()


def _record_workers(
    state: State,
    node: KnownNode,
    message: Able | Lost | Checkpointed | StandstillReport | AwaitedWorker | LastCalls,
) -> None:
    """Record the state of a node's workers: recoverable, lost, saved, or at a standstill."""
    match message:
        case Lost(fence=fence, reason=reason):
            recovery.record_lost_peer(state, node, fence, reason)
        case Checkpointed(fence=fence) if node.is_of(fence) and node.is_member:
            growth.record_checkpoint(state, message.where, resumed=message.resumed)
            recovery.log_shrunk(state, is_agreed=True)
        case StandstillReport(fence=fence) if fence == node.fence:
            node.progress.record_evidence(message.evidence, message.still_s, early=message.early)
            state.incidents.standstill.note()
        case AwaitedWorker(fence=fence) if fence == node.fence and node.is_member:
            state.incidents.standstill.wait_for(message.sentence, state.now_s)
        case LastCalls():
            ending.compare_calls(state, node.id, message.fence, message.calls)
        case Able():
            node.renew_offer(message.offer, message.fence)
            node.workers.shard(message.sharding)
            node.workers.admit(message.joining)
            recovery.record_recoverable(state, node, message.workers)


def _keep_for_contest(state: State, session: int, message: ToCoordinator) -> None:
    """Keep the message of an agent whose node id is contested, until it is admitted.

    Other agents without a node have not joined, or a newer session replaced theirs.
    """
    for contest in state.roster.contests_of(session):
        if isinstance(message, Heartbeat):
            state.queue.add(Send(session, Alive(state.term.has_authority)))
        elif isinstance(message, Ready | Leave):
            contest.keep(message)


def _record_request(state: State, node: KnownNode, message: Leave | Conclude) -> None:
    """Record a request of an agent, about itself or the job."""
    reason = message.reason[:REASON_CHARS_MAX]
    if isinstance(message, Conclude):
        ending.conclude(state, node.id, message.ok, reason)
        return
    by_s = math.inf
    if message.within_s is not None:
        margin_s = min(LEAVE_MARGIN_S, message.within_s / 4)
        by_s = state.now_s + message.within_s - margin_s
    node.leave(reason, by_s)
    state.log(EventKind.NODE_LEAVING, reason, node.id)


def _ready(state: State, node: KnownNode) -> None:
    """Record that the node's workers can start quickly."""
    node.become_ready()
    if state.phase is not MembershipPhase.FORMING:
        # The last call counts from the join; a running job gathers nodes once they are ready.
        state.gathering.note_arrival(state.now_s)
    state.log(EventKind.NODE_READY, "its workers can start quickly", node.id)


def record_failures(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> None:
    """Put failures of `node` on the coordinator's time line."""
    # An agent reports all its failures each time; a lost standby among them was charged by itself.
    failures = tuple(f for f in failures if not node.workers.is_known_loss(f))
    if state.phase in (MembershipPhase.RECOVERING, MembershipPhase.FORMING):
        node.keep_failures(failures)  # Counted once this world is known to be the current one.
        return
    if state.in_place.active or node.place is Place.STANDBY:
        failures = _of_places(state, node, failures)
    if not failures:
        return
    node.workers.fail()
    if state.phase is MembershipPhase.DRAINING and not state.in_place.active:
        _failed_in_drain(state, node, failures)
        return
    with_world = (
        MembershipPhase.RUNNING,
        MembershipPhase.DRAINING,
        MembershipPhase.REGROUPING,
        MembershipPhase.STOPPING,
    )
    if state.phase not in with_world or not node.is_member:
        return
    first = failures[0]
    incident = liveness.ensure_incident(
        state,
        f"{worker_text(first.rank)} on node {node.id} {end_text(first)}"
        + (" after it lost a peer" if is_lost_peer(first) else "")
        + (" after the state of the job was lost" if is_state_lost(first) else "")
        + (TO_RESTART if asks_restart(first) else ""),
    )
    incident.record(node.id, failures, state.now_s)
    ending.note_mismatch(state, incident)
    state.holders.record_ended_workers(node, {f.local_rank for f in failures}, state.world)
    if state.in_place.active:
        node.workers.lose(failures)


def _of_places(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Return the failures of workers with a place; failures of standbys are handled here."""
    standby = node.place is Place.STANDBY
    places = () if standby else set(node.workers.ranks) - node.workers.lost
    inside = tuple(f for f in failures if f.local_rank in places)
    joiners = tuple(f for f in failures if f.local_rank not in places)
    if joiners and state.phase in (
        MembershipPhase.RUNNING,
        MembershipPhase.DRAINING,
        MembershipPhase.REGROUPING,
    ):
        recovery.record_standby_failure(state, node, joiners)
    return inside


def _failed_in_drain(state: State, node: KnownNode, failures: tuple[Failure, ...]) -> None:
    """End the drain if others would wait for the failed worker; it is never charged.

    A peer lost to a finished drain is no fault, nor is a failure that SIGTERM caused.
    """
    asked = not state.drain.target_sent or state.drain.target is not None
    if asked and not node.drain.saved and not all(is_lost_peer(f) for f in failures):
        text = exit_text(failures[0].exit_code)
        liveness.ensure_incident(
            state, f"a worker of node {node.id} ended with {text} during a drain"
        )
    node.drain.excuse()


def record_earlier_stops(state: State) -> None:
    """Record that members are stopping their workers, as an earlier coordinator asked.

    Peers lost because of that are never charged; a failed worker is.
    """
    sightings = state.incidents.current.sightings if state.incidents.current is not None else []
    if state.in_place.active or not all(is_lost_peer(each.failure) for each in sightings):
        return
    for node in [node for node in state.roster.members() if node.workers.stopping]:
        why = f"node {node.id} came back while it was stopping its workers"
        liveness.ensure_incident(state, why).blame_departure(node.id)


def _stopped(state: State, node: KnownNode, message: Stopped) -> None:
    if not node.is_of(message.fence):
        return
    state.incidents.note_use(node.id, message.use)
    if node.is_member:
        state.worlds.record_loss()
        if message.calls and state.incidents.current is not None:
            state.incidents.current.note_calls(node.id, message.calls)
        state.holders.record_ended_workers(node, {*node.workers.ranks}, state.world)
    with_world = (MembershipPhase.RUNNING, MembershipPhase.DRAINING, MembershipPhase.REGROUPING)
    before_its_stop = message.unasked and state.phase is MembershipPhase.STOPPING
    if (state.phase in with_world or before_its_stop) and node.is_member:
        # Its agent was isolated for too long, or its user stopped it. Other failures follow from
        # that.
        why = f"node {node.id} stopped its workers by itself"
        if not state.term.has_authority:
            why += ", since the store accepts no decisions"
        incident = liveness.ensure_incident(state, why)
        incident.blame_departure(node.id)
    state.holders.note_accounted(node)
    node.forget_workers()
