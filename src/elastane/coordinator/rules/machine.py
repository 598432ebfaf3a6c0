"""The coordinator's state machine: facts arrive as events, level-triggered rules decide.

Theory of operation. An event only records a fact (`admission`, `reports`, `liveness`). Then the
rule of the current phase runs, and again after each change of phase, until nothing changes. So no
fact is lost because it arrived in another phase. A coordinator without authority records facts and
decides nothing until it has authority again.

The facts stand in the parts of `State`; each part is changed by its own methods only. `nodes` has
what is known of each agent. `worlds`, `state_holders`, `incident` and `changes` have what is known
of the job. The rules stand above them: `next_world` says which workers the next world consists of,
`forming` and `recovery` when it is committed, `ending` when there is none.

The phases, and what moves the job from one to another; the first condition that holds decides:

    phase       condition                                              next phase
    ----------  -----------------------------------------------------  ----------------------
    (start)     the record has an outcome                              CLOSING
                the record has a world, and not all were released      RECOVERING
                otherwise                                              FORMING
    (any)       an agent asked to end the job                          CLOSING
    RECOVERING  all members are back with their workers                RUNNING
                the time is over, some are back                        REGROUPING or STOPPING
                the time is over, none is back                         FORMING
    FORMING     a node has workers of the current world, or agents     RECOVERING
                report a world that is not on record
                enough nodes, and the last call or wait is over        RUNNING
                too few nodes for join_timeout, or no replica fits     CLOSING
    RUNNING     too many stalls in a row                               CLOSING
                an incident: failure, departure, stall, lost peer      REGROUPING or STOPPING
                all workers succeeded                                  CLOSING
                a partial replica, and all members are level           REGROUPING
                nodes leave, arrive, or exceed the maximum             DRAINING
                a checkpoint, and capacity beside a shrink-only world  DRAINING
    DRAINING    an unplanned incident                                  REGROUPING or STOPPING
                all workers succeeded before they were asked           CLOSING
                in place, and all workers finished their steps         RUNNING
                it only adds workers at a boundary, and timed out      RUNNING
                it was for growth, and all workers checkpointed        STOPPING
                all workers checkpointed, or the drain timed out       REGROUPING or STOPPING
    REGROUPING  a lost worker alone held part of the state             STOPPING
                no survivor is left, or the others finished            STOPPING
                too few are left, and none can join before a boundary  STOPPING
                enough workers can enter the next world                RUNNING
                too few for join_timeout, the budget refuses,          CLOSING
                or no replica fits
    STOPPING    all workers are stopped, and the budget refuses        CLOSING
                all workers are stopped                                FORMING
    CLOSING     all agents know the outcome, or had CLOSE_S            CLOSED

"REGROUPING or STOPPING" is `_end_world`: REGROUPING if the workers recover in place and survivors
hold the state, otherwise STOPPING.

A `Persist` stands in the effects before any message that depends on it: a committed world before
its `Assign`, a charged restart before its `Prepare` or the next `Assign`, an outcome before its
`Close`, the last release before its `Release`. Stopping and interrupting need no record, since they
are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastane.coordinator.rules import (
    admission,
    culprits,
    cuts,
    drain,
    ending,
    forming,
    growth,
    liveness,
    next_world,
    recovery,
    reports,
    sizing,
    status,
)
from elastane.coordinator.rules.changes import WaitingCapacity
from elastane.coordinator.rules.incident import Incident, Incidents, RestartBudget
from elastane.coordinator.rules.nodes import KnownNode, Place, named
from elastane.coordinator.rules.ranks import member_of
from elastane.coordinator.rules.state import (
    NO_PREDECESSOR,
    CoordinatorTerm,
    MembershipPhase,
    Stage,
    State,
    Takeover,
)
from elastane.coordinator.rules.state_holders import StateHolders
from elastane.protocol.effects import Finished, RendezvousEffect
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
)
from elastane.protocol.limits import (
    CLOSE_S,
    HOLDER_GRACE_S,
    REJOIN_GRACE_S,
    STOP_MARGIN_S,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    AgentPresence,
    Join,
    Query,
    Release,
    Report,
)
from elastane.protocol.model import Fence, JobRecord, JobSpec, Joining, World

# The longest chain of phases in one call is recovering, stopping, forming, running. A longer one
# means that two rules contradict each other.
_STEPS_MAX = 12


class Rendezvous:
    """Membership, restarts and drains of one job.

    The same events at the same times give the same effects.
    """

    def __init__(self, spec: JobSpec, now_s: float, takeover: Takeover = NO_PREDECESSOR) -> None:
        record = takeover.record
        budget = RestartBudget.of(spec.max_restarts, record)
        if record is not None and record.resized:
            spec = spec.sized_as(record.spec)
        self._state = State(
            spec,
            now_s,
            CoordinatorTerm.of(takeover, now_s),
            budget,
            Stage(now_s),
            StateHolders(takeover.store_backed, spec.timing.fence_wait_s),
            WaitingCapacity(now_s),
            incidents=Incidents.of(record),
        )
        self._state.queue.wait_until(now_s)
        if record is not None:
            load_record(self._state, record)

    def handle(self, event: RendezvousEvent, now_s: float) -> list[RendezvousEffect]:
        """Record `event` at `now_s` (monotonic seconds), and return the effects to perform."""
        state = self._state
        assert now_s >= state.now_s, f"time went back from {state.now_s} to {now_s}"
        state.advance(now_s)
        may_decide = self._record(event)
        if may_decide or state.queue.is_due(now_s):
            state.queue.forget_wake()
            self._run_rules()
        return state.queue.pop()

    @property
    def wake_s(self) -> float | None:
        """When a Tick is needed at the latest, in monotonic seconds; None: never."""
        return self._state.queue.wake_s

    @property
    def phase(self) -> MembershipPhase:
        """The current phase."""
        return self._state.phase

    @property
    def last_fence(self) -> Fence | None:
        """The fence of the last world."""
        return self._state.world.fence if self._state.world is not None else None

    @property
    def short_of_nodes_s(self) -> float:
        """For how long there have been too few nodes for a world that follows another.

        Survivors that keep their state for a world in place wait for such nodes, too.
        """
        state = self._state
        here = len(state.roster.nodes) - len(state.roster.unreachable)
        if (
            state.phase not in (MembershipPhase.FORMING, MembershipPhase.REGROUPING)
            or state.world is None
            or here >= sizing.fewest_nodes(state)
        ):
            return 0.0
        return state.now_s - state.stage.began_s

    def report(self) -> Report:
        """Return what `elastane status` shows."""
        return status.report(self._state)

    def presence(self) -> list[AgentPresence]:
        """Return the agents that are here, and the members of the current world that are not."""
        return status.presence(self._state)

    def _record(self, event: RendezvousEvent) -> bool:
        """Record what `event` says; return whether a rule may now decide otherwise."""
        state = self._state
        match event:
            case Received(message=Query()):
                state.queue.add(status.answer(state, event.session))
                return False
            case Received(message=Join()):
                admission.handle_join(state, event)
                return True
            case Received():
                return reports.record_message(state, event.session, event.message)
            case Broken():
                liveness.record_broken_session(state, event)
                return True
            case Resized(min_nodes=min_nodes, max_nodes=max_nodes):
                state.owner.request_range(min_nodes, max_nodes)
                return True
            case Fenced(incarnations=incarnations, dead=dead):
                admission.apply_fencing(state, incarnations, dead)
                return True
            case AuthorityChanged(held=held, reason=reason):
                self._set_authority(held, reason)
                return True
            case _:
                return False  # A tick carries nothing but its time.

    def _set_authority(self, held: bool, reason: str) -> None:
        if self._state.term.set_authority(held=held):
            kind = EventKind.AUTHORITY_REGAINED if held else EventKind.AUTHORITY_LOST
            self._state.log(kind, reason)

    def _run_rules(self) -> None:
        state = self._state
        for _ in range(_STEPS_MAX):
            liveness.declare_departures(state)
            admission.resolve_contests(state)
            if not state.term.has_authority:
                return
            sizing.apply_range(state)
            cuts.readmit(state)
            if state.holders.is_record_outdated():
                state.holders.note_recorded()
                state.persist()
            if not ending.concluded(state) and not RULES[state.phase](state):
                return
        raise AssertionError(f"rules contradict one another in phase {state.phase}")


def load_record(state: State, record: JobRecord) -> None:
    """Start a new coordinator from the job's durable record."""
    state.roster.load(record.versions)
    state.holders.load(record.kept)
    if record.resized:
        state.owner.note_resized()
    ended = record.outcome is not None
    state.worlds.load(record.world, may_train=not (record.over or ended))
    if record.outcome is not None:
        state.term.note_ended_before()
        state.ending.close(record.outcome)
        state.enter(MembershipPhase.CLOSING, f"the job has ended: {record.outcome.reason}")
    elif record.world is not None and record.over:
        state.worlds.release_all()
        state.stage.explain(f"all nodes of {record.world.fence} had been released")
    elif record.world is not None:
        state.enter(
            MembershipPhase.RECOVERING,
            f"a new coordinator waits for the {len(record.world.members)} nodes of"
            f" {record.world.fence}",
        )


@dataclass(frozen=True, slots=True)
class _Returned:
    """Which nodes of the last world are back with a new coordinator."""

    present: list[KnownNode]
    missing: list[str]
    awaited: list[str]  # the missing ones that are not known to be dead
    are_named: bool  # the missing ones by their ids; of a world that is on no record by their ranks

    @property
    def members(self) -> list[KnownNode]:
        """The nodes that still have workers of that world."""
        return [node for node in self.present if node.is_member]


def _recovering(state: State) -> bool:
    """Wait for the last world, then resume it, continue without some nodes, or form another."""
    if _most_are_away(state):
        return False
    returned = _returned(state)
    if _must_wait_for_return(state, returned):
        return False
    if state.world is None:
        _adopt_reported_world(state, returned.present)
    members = returned.members
    if state.worlds.intact and not returned.missing and len(members) == len(returned.present):
        return _resume(state, returned.present)
    if members or any(map(state.holders.is_displaced_holder, state.roster.nodes.values())):
        return _end_incomplete_world(state, returned)
    reason = "none of the last world's workers is left"
    forming.begin_gathering(state, reason, follow_up=bool(returned.present))
    return True


def _returns_until_s(state: State) -> float:
    return state.stage.began_s + state.spec.timing.reregister_s


def _most_are_away(state: State) -> bool:
    """Whether more than one node is away; this keeps the return of a large world linear."""
    known, until_s = len(state.roster.nodes) + len(state.owner.dead), _returns_until_s(state)
    if known >= state.worlds.size - 1 or state.now_s >= until_s:
        return False
    state.queue.wait_until(until_s)
    return True


def _returned(state: State) -> _Returned:
    nodes, ids = state.roster.nodes, state.worlds.node_ids
    here = {i for i in ids if i in nodes and i not in state.roster.unreachable}
    missing = [node_id for node_id in ids if node_id not in here]
    dead = state.owner.dead_members(state.world)
    return _Returned(
        present=[nodes[node_id] for node_id in ids if node_id in here],
        missing=missing,
        awaited=[node_id for node_id in missing if node_id not in dead],
        are_named=state.world is not None,
    )


def _must_wait_for_return(state: State, returned: _Returned) -> bool:
    """Whether to wait for more nodes of the last world, or for displaced state holders."""
    until_s, members = _returns_until_s(state), returned.members
    if members and returned.awaited == [state.term.previous_node]:
        until_s = _await_previous_node(state, until_s)
    # Without any member, the displaced state holders are needed.
    late = not members and any(i not in state.roster.nodes for i in state.holders.displaced)
    if not (returned.awaited or late) or state.now_s >= until_s:
        return False
    state.queue.wait_until(until_s)
    return True


def _await_previous_node(state: State, deadline_s: float) -> float:
    """Return until when to wait for the last coordinator's node, once all others are here.

    That node most likely ended with its coordinator, so the wait is short. If the store was away, a
    live coordinator lost its leadership, and its node comes back at the same time as the others.
    If its address refuses connections, the wait is that for a node whose connection broke.
    """
    grace_s = REJOIN_GRACE_S if state.term.previous_refuses else HOLDER_GRACE_S
    return min(deadline_s, state.term.await_previous(state.now_s + grace_s))


def _end_incomplete_world(state: State, returned: _Returned) -> bool:
    """End the last world, whose other members did not come back in time."""
    missing = returned.missing
    without = [node.id for node in returned.present if not node.is_member]
    lost = named(missing) or f"workers of {named(without) or 'other nodes'}"
    if missing and returned.are_named:
        lost = f"node{'s' if len(missing) > 1 else ''} {lost}"
    how = "did not come back to the new coordinator within the time"
    how = how if returned.awaited or not missing else "ended, as the job's owner says"
    reason = f"{lost} {how}"
    if returned.are_named:
        _log_departures(state, missing, how)
    # Later failures on the members here follow from the broken world, and are not charged.
    gone = missing + without or ["others"]
    incident = Incident(at_s=state.now_s, reason=reason, planned=False, departed=gone)
    state.incidents.open(incident)
    state.log(EventKind.INCIDENT, reason, departed=len(gone))
    state.in_place.begin(active=recovery.is_in_place(state))
    state.stage.assume_running()
    agents = {m.node_id: m.incarnation for m in state.world.members} if state.world else {}
    for node_id in missing:
        liveness.note_possibly_training(state, node_id, agents.get(node_id, ""))
    state.holders.note_resumed_without(state.now_s)
    _apply_reported_failures(state)
    return _end_world(state, reason)


def _log_departures(state: State, missing: list[str], how: str) -> None:
    """Log that nodes departed which this coordinator never met; the others depart on their own."""
    for node_id in missing:
        if node_id not in state.roster.nodes:
            was_last = node_id == state.term.previous_node
            why = f"the last coordinator ran on it; it {how}" if was_last else f"it {how}"
            state.log(EventKind.NODE_DEPARTED, why, node_id)


def _adopt_reported_world(state: State, present: list[KnownNode]) -> None:
    """Take the world that agents report as the current one."""
    assert state.worlds.unrecorded is not None, "recovering needs a recorded or a reported world"
    fence = state.worlds.unrecorded.fence
    members = [member_of(n.spec, () if n.has_all_in_world else n.workers.ranks) for n in present]
    for node in state.roster.nodes.values():
        if node.place is Place.REPORTED and node.fence == fence:
            node.become_member(recorded=True)
            state.roster.reindex(node)  # Its reports count from now on.
    holders = sum(node.is_member for node in present)
    state.worlds.adopt(World(fence=fence, members=tuple(members)), holders)


def _resume(state: State, present: list[KnownNode]) -> bool:
    state.worlds.resume(state.now_s)
    state.in_place.begin(active=recovery.is_in_place(state))
    state.in_place.note_partial(partial=sizing.has_partial_replicas(state))
    state.enter(MembershipPhase.RUNNING, "all nodes of the world are back; nothing restarts")
    state.log(EventKind.ROUND_RESUMED, state.stage.reason, nodes=len(present))
    state.persist()
    drain.resume_drain(state)  # Before failures are counted: those may follow from the drain.
    _apply_reported_failures(state)
    return True


def _apply_reported_failures(state: State) -> None:
    """Count the failures that happened while there was no coordinator."""
    for node in [node for node in state.roster.nodes.values() if node.is_current]:
        failures = node.pop_failures()
        recovery.end_if_broken(state, node)
        reports.record_failures(state, node, failures)
        state.roster.reindex(node)
    reports.record_earlier_stops(state)


def _running(state: State) -> bool:
    assert state.world is not None
    recovery.begin_if_all_recover(state)
    culprits.find_culprit(state)
    if recovery.end_without_step(state) and recovery.has_stalled_too_often(state):
        return ending.stalled(state)
    if state.incidents.current is not None:
        return _end_world(state, state.incidents.current.reason)
    if len(state.roster.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.in_place.partial_replicas:
        return _end_partial(state)
    _release_leaving(state)
    recovery.stop_leaving(state)
    recovery.prepare_standbys(state)
    recovery.replace_uncharged(state)
    if planned := growth.growth_due(state):
        return drain.begin_drain(state, growth.describe(planned, state.now_s), planned)
    may_drain = not state.in_place.active or state.roster.is_stepping()
    if may_drain and (parting := sizing.reason_to_shrink(state)):
        return drain.begin_drain(state, parting)
    arrivals = (
        recovery.standbys_due(state) if state.in_place.active else forming.arrivals_due(state)
    )
    if arrivals:
        admits = next_world.joining(state) is Joining.PLANNED
        return drain.begin_drain(state, f"adding workers of {named(arrivals)}", admits=admits)
    return False


def _end_partial(state: State) -> bool:
    """End a world with a partial replica, once its members are level or none holds a slice."""
    if sizing.hold_no_slices(state):
        why = recovery.open_without_slices(state)
        return _stop_world(state, why)
    return recovery.end_if_level(state)


def _draining(state: State) -> bool:
    assert state.world is not None and state.incidents.current is not None
    recovery.begin_if_all_recover(state)
    if not state.incidents.current.planned:
        return _end_world(state, state.incidents.current.reason)
    if state.in_place.active and recovery.end_cut_drain(state):
        return _end_cut_world(state)
    # After the request to checkpoint, an exit with 0 may only mean that a worker did that.
    asked = state.drain.target_sent or state.drain.began_earlier
    if not asked and len(state.roster.succeeded) == len(state.world.members):
        return ending.success(state)
    if state.in_place.active and not state.roster.is_stepping():
        return _call_off(state)
    if not state.drain.target_sent and not state.roster.ungated:
        if drain.lacks_boundary(state):
            return _give_up_drain(state)
        drain.set_target(state)
    elif (
        state.drain.target_sent
        and state.drain.target is not None
        and drain.all_save(state)
        and not state.drain.stops_all
    ):
        drain.stop_at_target(state)
    if state.drain.target_sent and not state.roster.unsaved:
        return _end_drained(state, state.incidents.current.reason)
    return _await_drained(state)


def _end_cut_world(state: State) -> bool:
    """End a world that reaches no boundary, since some of its nodes do not reach others."""
    if recovery.has_stalled_too_often(state):
        return ending.stalled(state)
    assert state.incidents.current is not None
    return _end_world(state, state.incidents.current.reason)


def _end_drained(state: State, reason: str) -> bool:
    """End the world, all of whose workers are where the drain wants them."""
    took_s = state.now_s - state.stage.began_s
    done = "all workers have saved, or wait at the boundary"
    state.log(EventKind.DRAIN_ENDED, f"{done}, after {took_s:.2f} s")
    state.owner.end_misses()
    if state.drain.admits:
        state.joining_tries.end_pauses()
    if state.drain.growth is not None:
        growth.log_growth(state, state.drain.growth)
        return _stop_world(state, reason)
    return _end_world(state, reason)


def _await_drained(state: State) -> bool:
    """Wait for the rest of the workers until the drain times out."""
    deadline_s = drain.ends_s(state)
    if state.now_s < deadline_s:
        state.queue.wait_until(deadline_s)
        return False
    return _give_up_drain(state)


def _give_up_drain(state: State) -> bool:
    """Call the drain off, or end the world although some workers have not checkpointed."""
    assert state.incidents.current is not None
    if state.drain.is_optional:
        return drain.call_off(state)
    state.log(EventKind.DRAIN_ENDED, f"workers of {named(state.roster.unsaved)} did not checkpoint")
    if not drain.all_workers_end(state):
        drain.drained_late(state)
    return _end_world(state, state.incidents.current.reason)


def _call_off(state: State) -> bool:
    """End a drain whose workers finished their steps: there is no world left to change."""
    state.incidents.drop()
    state.enter(MembershipPhase.RUNNING, "the workers have finished their steps")
    state.log(EventKind.DRAIN_ENDED, state.stage.reason)
    return True


def _end_world(state: State, reason: str) -> bool:
    """Move to the next world, with the same processes if workers recover in place."""
    growth.record_fault(state)
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, reason)
    if state.in_place.active and (recovery.has_survivors(state) or recovery.may_return(state)):
        return recovery.interrupt_world(state, reason)
    return _stop_world(state, reason)


def _stop_unhealed(state: State, reason: str) -> bool:
    return _stop_world(state, f"{reason}; no other worker holds its part of the state")


def _regrouping(state: State) -> bool:
    assert state.incidents.current is not None
    if recovery.is_beyond_healing(state):
        return _stop_unhealed(state, state.incidents.current.reason)
    survive = recovery.has_survivors(state)
    if recovery.may_return(state) and (not survive or recovery.is_ending(state)):
        return _await_return(state)
    if not survive and not state.roster.unreachable:
        return _stop_world(state, f"{state.incidents.current.reason}; no survivor is left")
    if recovery.is_ending(state):
        return _stop_world(
            state, f"{state.incidents.current.reason}; others have finished their steps"
        )
    if recovery.is_too_small(state):
        too_few = recovery.too_few_text(state)
        state.incidents.current.explain_stop(too_few)
        return _stop_world(state, f"{state.incidents.current.reason}; {too_few}")
    _release_leaving(state)
    if recovery.must_wait_for_state(state):
        return _await_possibly_training(state)
    return recovery.commit_when_enough(state)


def _await_possibly_training(state: State) -> bool:
    """Wait for unreachable state holders: they come back, or stop themselves in time."""
    wait_s = state.spec.timing.fence_wait_s
    reason = (
        f"{named(state.holders.possibly_training)} may hold the state of the job and train where"
        f" this coordinator cannot see it; the others wait, {wait_s:g} s at most"
    )
    if state.stage.reason != reason:
        state.enter(MembershipPhase.REGROUPING, reason)
        state.log(EventKind.WAITING, reason)
    # The wait does not count against join_timeout, so nodes that come during it are in time.
    recovery.prepare_standbys(state)
    state.stage.restart(state.now_s)
    return False


def _await_return(state: State) -> bool:
    """Wait for workers between two loops of steps, or after the last, until they return or exit."""
    assert state.incidents.current is not None
    until_s = state.stage.began_s + state.spec.timing.join_timeout_s
    if state.now_s >= until_s:
        reason = (
            f"{state.incidents.current.reason}; others have finished their steps, and do not exit"
        )
        return _stop_world(state, reason)
    state.queue.wait_until(until_s)
    return False


def _stop_world(state: State, reason: str) -> bool:
    state.in_place.stop_world()
    state.enter(MembershipPhase.STOPPING, reason)
    incident = state.incidents.current
    asks_calls = incident is not None and incident.may_differ
    for node in state.roster.holders_of_workers():
        assert node.fence is not None
        state.stop(node, node.fence, reason, asks_calls=asks_calls)
    return True


def _stopping(state: State) -> bool:
    if state.roster.with_workers:
        deadline_s = state.stage.began_s + state.spec.timing.shutdown_timeout_s + STOP_MARGIN_S
        if state.now_s < deadline_s:
            state.queue.wait_until(deadline_s)
            return False
        for node in state.roster.holders_of_workers():
            liveness.depart(state, node, "did not report its workers stopped within the time")
    incident = state.incidents.current
    assert incident is not None and state.world is not None
    delay_s, reason = 0.0, incident.reason
    if cut := cuts.leave_out_failed(state, incident):
        incident.charge()  # The network failed, and no worker.
        reason = f"{reason}; {cut}"
    if incident.is_chargeable and not incident.charged:
        if ending.verdict_pending(state, incident):
            return False
        verdict = ending.charge(state, incident)
        if not verdict.restart:
            return ending.failure(state, incident, verdict.reason)
        delay_s, reason = verdict.delay_s, f"{incident.reason}; {verdict.reason}"
    elif why := ending.record_free_restart(state, incident):
        return ending.failure(state, incident, why)
    state.incidents.finish(reason, state.world.fence)
    _release_leaving(state)
    forming.begin_gathering(state, reason, follow_up=True, delay_s=delay_s)
    return True


def _forming(state: State) -> bool:
    _release_leaving(state)
    return forming.commit_when_due(state)


def _release_leaving(state: State) -> None:
    """Release the nodes that asked to leave and have no workers any more."""
    released = [
        state.roster.nodes[i] for i in sorted(state.roster.leaving - state.roster.with_workers)
    ]
    if released and len(released) == len(state.roster.nodes):
        _record_all_released(state)
    for node in released:
        state.queue.send(node, Release(f"drained: {node.leaving}"))
        state.log(EventKind.NODE_RELEASED, node.leaving, node.id)
        state.roster.forget(node)


def _record_all_released(state: State) -> None:
    """Record that no worker of the current world is left, before the last node is released.

    A later coordinator cannot know it otherwise: the nodes may never come back, for instance if a
    suspended job is resumed with fewer pods.
    """
    worlds = state.worlds
    if worlds.current is not None and not (
        worlds.intact or state.holders.possibly_training or worlds.all_released
    ):
        worlds.release_all()
        state.persist()


def _closing(state: State) -> bool:
    due_s = state.stage.began_s + CLOSE_S
    if (state.roster.nodes or state.term.ended_before) and state.now_s < due_s:
        state.queue.wait_until(due_s)
        return False
    assert state.ending.outcome is not None
    state.enter(MembershipPhase.CLOSED, state.ending.outcome.reason)
    state.queue.add(Finished(state.ending.outcome))
    return False


def _closed(state: State) -> bool:
    return False


RULES: dict[MembershipPhase, Callable[[State], bool]] = {
    MembershipPhase.RECOVERING: _recovering,
    MembershipPhase.FORMING: _forming,
    MembershipPhase.RUNNING: _running,
    MembershipPhase.DRAINING: _draining,
    MembershipPhase.REGROUPING: _regrouping,
    MembershipPhase.STOPPING: _stopping,
    MembershipPhase.CLOSING: _closing,
    MembershipPhase.CLOSED: _closed,
}
