"""Admission: which agents may join, and what they bring with them.

A refusal names both sides and the next step. Two agents that claim one node id are a contest: the
second gets it if the first departs. Agents that the job's owner has fenced are refused or
disconnected: a pod on a node that the cluster lost may be alive and return after its replacement.
An admitted agent may bring workers. They are adopted if they belong to the current world, or to
none that was recorded; workers of any other world are stopped.
"""

from __future__ import annotations

from elastane.coordinator.rules import drain, liveness, recovery, reports, sizing
from elastane.coordinator.rules.nodes import KnownNode, NodeConnection, Place
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.effects import Hangup
from elastane.protocol.events import Received
from elastane.protocol.limits import NAME_CHARS_MAX
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Alive, Close, Holding, Interrupt, Join, Refused, Welcome
from elastane.protocol.model import Assignment, JobSpec, NodeSpec, Outcome, WorldMember

# No job has more rounds: one a second for 34 years. It bounds the highest round that is believed.
ROUND_MAX = 1 << 30

# A name that becomes part of a path must not lead elsewhere.
_NO_NAME = frozenset("/\\")


def handle_join(state: State, event: Received) -> None:
    """Admit the agent of `event`, refuse it, or let it wait while its node id is contested."""
    assert isinstance(event.message, Join)
    join = event.message
    refusal = _refusal(state, join)
    if state.ending.outcome is not None and join.welcomed and _job_of(state, join) == state.spec:
        _dismiss(state, event, state.ending.outcome)
    elif refusal:
        _refuse(state, event.session, join.node.node_id, refusal)
    else:
        _admit_or_contest(state, event, join)


def _admit_or_contest(state: State, event: Received, join: Join) -> None:
    old = state.roster.nodes.get(join.node.node_id)
    if old is None:
        _admit(state, event)
    elif old.spec.incarnation == join.node.incarnation:
        _admit_again(state, event, old)
    else:
        _contest(state, event, old)


def _dismiss(state: State, event: Received, outcome: Outcome) -> None:
    """Send the outcome to an agent of this job that came back after the end."""
    assert isinstance(event.message, Join)
    old = state.roster.nodes.get(event.message.node.node_id)
    if old is not None:
        state.roster.forget(old)
    state.queue.hang_up(event.session, Close(outcome), outcome.reason)


def resolve_contests(state: State) -> None:
    """Decide the contests that can be decided.

    The newcomer gets the node id once the old agent has departed, by the rules for any departure:
    a host under load may be silent for a while and live. The old agent keeps it if it still sends
    after the silence limit, since messages sent before a death may arrive that late.
    """
    for node_id, contest in [*state.roster.contests.items()]:
        old = state.roster.nodes.get(node_id)
        has_ended = state.ending.outcome is not None
        lives_s = contest.began_s + state.spec.timing.silence_s
        if old is not None and not has_ended and old.connection.heard_s < lives_s:
            continue
        state.roster.end_contest(node_id)
        if old is not None and not has_ended:
            _refuse(state, contest.join.session, node_id, _duplicate(contest.join, old))
            continue
        handle_join(state, contest.join)
        for message in contest.messages.values():
            reports.record_message(state, contest.join.session, message)


def _contest(state: State, event: Received, old: KnownNode) -> None:
    waiting = state.roster.contests.get(old.id)
    if waiting is not None:
        _refuse(state, waiting.join.session, old.id, _duplicate(waiting.join, None))
    state.roster.begin_contest(old.id, event, state.now_s)
    # If the old agent's host was started again, it resets the connection that it does not know.
    state.queue.send(old, Alive(state.term.has_authority))


def _duplicate(event: Received, old: KnownNode | None) -> Refused:
    assert isinstance(event.message, Join)
    node_id = event.message.node.node_id
    holder = f" at {old.connection.peer_host}" if old else ""
    return Refused(
        what=f"node id {node_id!r} is in use by another live agent{holder}, and was also asked"
        f" for by the agent at {event.peer_host}",
        slug="duplicate-node",
        expected="a node id that no other agent of the job has",
        next_step="give each agent its own: elastane run --node-id NAME ...",
    )


def _refuse(state: State, session: int, node_id: str, refusal: Refused) -> None:
    state.log(EventKind.NODE_REFUSED, f"{refusal.what} [{refusal.slug}]", node_id)
    state.queue.hang_up(session, refusal, refusal.what)


def _refusal(state: State, join: Join) -> Refused | None:
    return (
        _closed(state)
        or refuse_if_fenced(state, join.node)
        or _bad_name(join)
        or _bad_place(join)
        or _bad_fence(join)
        or _other_job(state, join)
        or _other_versions(state, join)
        or _other_shape(state, join)
    )


def _closed(state: State) -> Refused | None:
    if state.ending.outcome is None:
        return None
    return Refused(
        what=f"job {state.spec.job!r} has ended: {state.ending.outcome.reason}",
        slug="job-closed",
        expected="a job that still runs",
        next_step="start a new job under another id: elastane run --rdzv-id NAME ...",
    )


def refuse_if_fenced(state: State, node: NodeSpec) -> Refused | None:
    """Return a refusal for an agent that the owner has fenced, otherwise None."""
    if not state.owner.is_fenced(node.incarnation):
        return None
    return Refused(
        what=f"node {node.node_id} (incarnation {node.incarnation}) is fenced",
        slug="node-fenced",
        expected="an agent that the job's owner has not given up",
        next_step="nothing: another takes its place",
    )


def _bad_name(join: Join) -> Refused | None:
    node_id = join.node.node_id
    plain = node_id.isprintable() and not set(node_id) & _NO_NAME and node_id not in (".", "..")
    if plain and 0 < len(node_id) <= NAME_CHARS_MAX:
        return None
    return Refused(
        what=f"node id {node_id[:40]!r}... of {len(node_id)} characters cannot be used",
        slug="bad-node-id",
        expected=f"1 to {NAME_CHARS_MAX} printable characters without slashes",
        next_step="give another: elastane run --node-id NAME ...",
    )


def _bad_place(join: Join) -> Refused | None:
    """Check role and address: they become variables of workers and parts of file names."""
    node = join.node
    for option, text in (("--role", node.role), ("--local-addr", node.local_addr)):
        if len(text) > NAME_CHARS_MAX or not text.isprintable() or set(text) & _NO_NAME:
            return Refused(
                what=f"{option} {text[:40]!r} of node {node.node_id} cannot be used",
                slug="bad-name",
                expected=f"{NAME_CHARS_MAX} printable characters at most, without slashes",
                next_step=f"give another: elastane run {option} VALUE ...",
            )
    return None


def _bad_fence(join: Join) -> Refused | None:
    """Refuse a round that no job reaches: the next world has to exceed every round believed."""
    held = join.holding.assignment.fence if join.holding else None
    beyond = [fence for fence in (join.seen, held) if fence is not None and fence.round > ROUND_MAX]
    if not beyond:
        return None
    return Refused(
        what=f"node {join.node.node_id} says that it has seen {beyond[0]}",
        slug="bad-fence",
        expected=f"a round up to {ROUND_MAX}",
        next_step="restart that agent",
    )


def _other_job(state: State, join: Join) -> Refused | None:
    ours, theirs = state.spec, _job_of(state, join)
    if ours == theirs:
        return None
    differing = [f for f in ours.__struct_fields__ if getattr(ours, f) != getattr(theirs, f)]
    slug = "wrong-job" if "job" in differing else "config-mismatch"
    sides = "; ".join(
        f"{field}: the job has {getattr(ours, field)!r}, this agent {getattr(theirs, field)!r}"
        for field in differing
    )
    return Refused(
        what=f"this agent's job is not the one that is running here: {sides}",
        slug=slug,
        expected="the same --rdzv-id, --nnodes, --max-restarts, --in-place and --rdzv-conf on every"
        " node",
        next_step="start every agent of a job with the same command line",
    )


def _job_of(state: State, join: Join) -> JobSpec:
    """Return the job that this agent was started for, with the job's current range of nodes."""
    return join.spec.sized_as(state.spec) if state.owner.resized else join.spec


def _other_versions(state: State, join: Join) -> Refused | None:
    ours, theirs = state.roster.versions, join.node.versions
    if ours is None or ours == theirs:
        return None
    sides = "; ".join(
        f"{field} {getattr(ours, field) or 'none'} in the job,"
        f" {getattr(theirs, field) or 'none'} on node {join.node.node_id}"
        for field in ours.__struct_fields__
        if getattr(ours, field) != getattr(theirs, field)
    )
    return Refused(
        what=f"versions differ: {sides}",
        slug="version-skew",
        expected="the same elastane, torch, Python minor version and accelerator stack everywhere",
        next_step="install the job's versions on that node, or restart the job with its own",
    )


def _other_shape(state: State, join: Join) -> Refused | None:
    if not (state.spec.identical_workers or state.spec.static):
        return None  # Nothing is compared with the other nodes, of which there may be many.
    size = join.node.local_world_size
    others = [n for n in state.roster.nodes.values() if n.id != join.node.node_id]
    if state.spec.identical_workers and others and others[0].spec.local_world_size != size:
        return Refused(
            what=f"--nproc-per-node {size} on node {join.node.node_id}, but"
            f" {others[0].spec.local_world_size} on node {others[0].id}, and the job was"
            " declared to have identical workers (TORCH_ELASTIC_WORKER_IDENTICAL=1)",
            slug="unequal-nproc",
            expected="the same number of workers on every node",
            next_step="give every node the same --nproc-per-node, or unset the variable",
        )
    if not state.spec.static:
        return None
    rank = join.node.node_rank
    if rank is None or not 0 <= rank < state.spec.max_nodes:
        what = f"--node-rank {rank} on node {join.node.node_id}"
    else:
        twin = next((n for n in others if n.spec.node_rank == rank), None)
        if twin is None:
            return None
        what = f"--node-rank {rank} on node {join.node.node_id} and on node {twin.id}"
    return Refused(
        what=f"{what}: the static backend takes each rank once",
        slug="node-rank",
        expected=f"each of 0 to {state.spec.max_nodes - 1} on exactly one node",
        next_step="give each node its own --node-rank, or use --rdzv-backend elastane",
    )


def apply_fencing(state: State, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
    """Record which agents are fenced or dead, and declare those that are here departed."""
    state.owner.fence(incarnations, dead)
    if state.owner.dead_members(state.world):
        state.worlds.record_loss()
    state.holders.drop_dead(state.owner.is_dead)
    for node in [*state.roster.nodes.values()]:
        refused = refuse_if_fenced(state, node.spec)
        if refused is None:
            continue
        state.queue.send(node, refused)
        liveness.depart(state, node, "it is fenced: the job's owner has given it up")


def _admit(state: State, event: Received) -> None:
    assert isinstance(event.message, Join)
    join = event.message
    _learn_from(state, join)
    node = state.roster.admit(join.node, join.offer, _connection(state, event), ready=join.ready)
    state.roster.look_by(state.now_s + state.spec.timing.silence_s)
    record_workers(state, node, join.holding)
    state.roster.reindex(node)
    state.gathering.note_arrival(state.now_s)
    kind = EventKind.NODE_REGISTERED_AGAIN if join.holding else EventKind.NODE_JOINED
    held = f", with the workers of {join.holding.assignment.fence}" if join.holding else ""
    state.log(
        kind,
        f"from {event.peer_host}, {join.node.local_world_size} workers{held}",
        node.id,
        local_world_size=join.node.local_world_size,
    )
    _welcome(state, node)


def _admit_again(state: State, event: Received, node: KnownNode) -> None:
    """Admit the same agent over a new connection: nothing is lost, and nothing restarts."""
    assert isinstance(event.message, Join)
    join = event.message
    if node.session is not None:
        state.roster.disconnect(node)
        state.queue.add(Hangup(node.session, "the agent has a newer connection"))
    _learn_from(state, join)
    node.reconnect(_connection(state, event), join.offer, ready=join.ready)
    state.roster.connect(node)
    held = join.holding.assignment.fence if join.holding else None
    _welcome(state, node)
    member = node.is_member and state.phase is not MembershipPhase.STOPPING
    is_uninformed = missed_place(state, node, join.holding) is not None
    if held != node.fence and member and not is_uninformed:
        why = f"it came back with {held or 'no workers'} instead of {node.fence}"
        incident = liveness.ensure_incident(state, f"node {node.id} lost its workers: {why}")
        incident.blame_departure(node.id)
    record_workers(state, node, join.holding)
    state.roster.reindex(node)
    if state.phase is MembershipPhase.DRAINING and node.is_member:
        drain.send_drain_request(state, node)
    elif (
        state.phase is MembershipPhase.RUNNING
        and node.is_member
        and join.holding is not None
        and join.holding.draining
    ):
        # The node had no session when the drain was called off.
        drain.send_call_off(state, node, join.holding.last_drain)
    state.log(EventKind.NODE_REGISTERED_AGAIN, "over a new connection", node.id)


def _connection(state: State, event: Received) -> NodeConnection:
    return NodeConnection(
        session=event.session,
        peer_host=event.peer_host,
        local_host=event.local_host,
        heard_s=state.now_s,
    )


def _learn_from(state: State, join: Join) -> None:
    """Record what this agent knows of the job's past."""
    state.worlds.note_fence(join.seen)
    if not state.term.store_backed:
        state.budget.note_used(join.restarts_seen)
        if join.welcomed and state.world is None:
            # An earlier coordinator existed, so other agents may still come with their workers.
            state.gathering.postpone(state.term.started_s + state.spec.timing.reregister_s)
    world, held = state.world, join.holding
    holds = held is not None and world is not None and held.assignment.fence == world.fence
    if not state.worlds.intact or world is None or holds:
        return
    if state.worlds.has_place(join.node.node_id):
        state.worlds.record_loss()  # A member of the current world has none of its workers.


def _welcome(state: State, node: KnownNode) -> None:
    state.queue.send(node, Welcome(phase=state.phase.value, reason=state.stage.reason))


def record_workers(state: State, node: KnownNode, holding: Holding | None) -> None:
    """Record the workers that an agent brings, and stop them if they are stale."""
    node.bring_workers(holding)
    if holding is not None:
        sizing.record_sharding(state, node)
        _find_place(state, node, holding)
    if node.place is not Place.STALE:
        state.holders.note_accounted(node)


def _find_place(state: State, node: KnownNode, holding: Holding) -> None:
    """Determine whether the workers are members, standbys, or stale."""
    missed = missed_place(state, node, holding)
    if missed is not None and state.world is not None:
        node.miss_assignment(state.world.fence, missed.local_ranks)
        _bring(state, node, holding)
    elif _is_displaced(state, node, holding):
        node.become_standby()
        _bring(state, node, holding)
    elif node.place is Place.STANDBY:
        _bring(state, node, holding)
        if state.phase in (
            MembershipPhase.FORMING,
            MembershipPhase.STOPPING,
        ):  # All workers start afresh.
            _stop_stale(state, node)
    else:
        _find_place_in_world(state, node, holding)


def _find_place_in_world(state: State, node: KnownNode, holding: Holding) -> None:
    """Keep workers of the current world, or of one that may turn out to be it; stop others."""
    assignment, fence = holding.assignment, holding.assignment.fence
    state.worlds.note_fence(fence)
    state.drain.note_number(holding.last_drain)
    node.drain.note_earlier(holding.last_drain, was_draining=holding.draining)
    if state.world is None and state.phase in (MembershipPhase.FORMING, MembershipPhase.RECOVERING):
        _record_reported_world(state, node, holding)
    current = state.worlds.fence
    if state.term.store_backed and current is not None and fence > current:
        # Another coordinator committed it: this one is deposed, and its shell has to learn of it.
        node.become_stale()
        state.term.set_authority(held=False)
        state.log(EventKind.AUTHORITY_LOST, f"node {node.id} has workers of {fence}", node.id)
        return
    if fence != current or not _is_in_world(state, node, assignment):
        _stop_stale(state, node)
        return
    node.become_member(recorded=state.world is not None)
    if state.phase is MembershipPhase.STOPPING:
        _stop(state, node)
    elif holding.state == "succeeded":
        node.workers.succeed()
    else:
        if holding.state == "stopping":
            node.workers.stop()
        else:
            _interrupt_again(state, node, holding)
        _bring(state, node, holding)


def _interrupt_again(state: State, node: KnownNode, holding: Holding) -> None:
    """Interrupt workers again if the first request was lost: they may still make steps."""
    if (
        state.phase is MembershipPhase.REGROUPING
        and state.incidents.current is not None
        and not holding.halted
    ):
        fence, reason = holding.assignment.fence, state.incidents.current.reason
        state.queue.send(node, Interrupt(fence=fence, reason=reason))


def missed_place(state: State, node: KnownNode, holding: Holding | None) -> WorldMember | None:
    """Return the place in the current world of workers whose agent has not received it.

    They are in an earlier world, and the current one makes no step without them: nothing is lost
    yet.
    """
    world = state.world
    if holding is None or world is None or not holding.able or holding.state == "stopping":
        return None
    if holding.assignment.fence >= world.fence or not state.worlds.has_place(node.id):
        return None
    member = next(m for m in world.members if m.node_id == node.id)
    known = member.incarnation == node.spec.incarnation
    return member if known and member.workers else None


def _is_displaced(state: State, node: KnownNode, holding: Holding) -> bool:
    """Whether the workers are displaced state holders that may be needed again."""
    has_world = state.phase not in (MembershipPhase.FORMING, MembershipPhase.STOPPING)
    if not has_world or state.world is None or node.id not in state.holders.displaced:
        return False
    older = holding.assignment.fence < state.world.fence and node.place is not Place.STANDBY
    return older and bool(holding.able) and holding.state != "stopping"


def _bring(state: State, node: KnownNode, holding: Holding) -> None:
    """Record failures that the agent reports; those that were charged before cost nothing."""
    node.workers.interrupt(holding.halted)
    state.roster.reindex(node)
    failures = recovery.drop_charged(state, node, holding.failures, {*holding.renewed})
    reports.record_failures(state, node, failures)


def _is_in_world(state: State, node: KnownNode, assignment: Assignment) -> bool:
    """Whether the current world has this very agent at that node rank."""
    if state.world is None:
        reported = state.worlds.unrecorded
        return reported is not None and reported.has(node.id, assignment)
    rank = assignment.node_rank
    if assignment.fence != state.world.fence or rank >= len(state.world.members):
        return False
    member = state.world.members[rank]
    return (member.node_id, member.incarnation) == (node.id, node.spec.incarnation)


def _record_reported_world(state: State, node: KnownNode, holding: Holding) -> None:
    """Rebuild the last world from what agents report, if there is no record of it."""
    assignment, before = holding.assignment, state.worlds.unrecorded
    if before is None or assignment.fence > before.fence:
        for node_id in before.node_ids.values() if before is not None else ():
            if node_id in state.roster.nodes:
                _stop_stale(state, state.roster.nodes[node_id])  # Its world was not the last one.
        state.worlds.note_reported(assignment)
        if state.phase is MembershipPhase.FORMING:
            fence, nodes = assignment.fence, assignment.nodes
            reason = f"agents hold {fence}: waiting for all {nodes} of its nodes"
            state.enter(MembershipPhase.RECOVERING, reason)
    assert state.worlds.unrecorded is not None, "it was recorded above"
    state.worlds.unrecorded.add(node.id, assignment)


def _stop_stale(state: State, node: KnownNode) -> None:
    """Stop the workers of a world that is not the current one, if the node still has them."""
    if node.place is not Place.IDLE:
        node.become_stale()
        _stop(state, node)


def _stop(state: State, node: KnownNode) -> None:
    assert node.fence is not None, "only workers are stopped"
    state.stop(node, node.fence, f"{node.fence} is no longer the current world")
