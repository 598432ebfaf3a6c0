"""The coordinator's reports: the status for `elastane status`, and the list of agents."""

from __future__ import annotations

import msgspec

from elastane.coordinator.rules.nodes import KnownNode, Place
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.effects import Send
from elastane.protocol.messages import AgentPresence, NodeStatus, Report, SafeCopies, StateCopy

# A report lists no more nodes than this, since a frame is bounded.
_LISTED_MAX = 1024


def presence(state: State) -> list[AgentPresence]:
    """Return all agents that are here, and the members of the current world that are not.

    While a new coordinator waits for the last world, no member counts as departed.
    """
    members = state.world.members if state.world else ()
    ranks = {(member.node_id, member.incarnation): i for i, member in enumerate(members)}
    called = [
        AgentPresence(
            node.spec.incarnation,
            "away" if node.session is None else "joined",
            ranks.pop((node.id, node.spec.incarnation), -1),
        )
        for node in state.roster.nodes.values()
    ]
    if state.phase is not MembershipPhase.RECOVERING:
        called += [AgentPresence(who[1], "departed", rank) for who, rank in ranks.items()]
    return called


def answer(state: State, session: int) -> Send:
    """Return the reply to a `Query` of `session`."""
    return Send(session, report(state))


def report(state: State) -> Report:
    """Return all that `elastane status` shows."""
    ranks = {m.node_id: i for i, m in enumerate(state.world.members)} if state.world else {}
    listed = sorted(state.roster.nodes.values(), key=lambda n: (ranks.get(n.id, 1 << 30), n.order))
    return Report(
        job=state.spec.job,
        phase=state.phase.value,
        reason=state.stage.reason,
        fence=state.world.fence if state.world else None,
        min_nodes=state.spec.min_nodes,
        max_nodes=state.spec.max_nodes,
        world_size=state.world.world_size if state.world else 0,
        restarts_used=state.budget.used,
        max_restarts=state.budget.allowed,
        uptime_s=state.now_s - state.term.started_s,
        nodes=tuple(_node(state, node, ranks) for node in listed[:_LISTED_MAX]),
        last_incident=state.incidents.last_reason,
        stalled=state.incidents.stalled if state.phase is MembershipPhase.RUNNING else "",
        safe=_safe(state),
    )


def _safe(state: State) -> SafeCopies:
    """Return the newest copies of the state by what they survive.

    Of replicated state every copy is whole, so two nodes that have one survive the loss of either.
    Of sharded state the part that is oldest counts, and all members must have one.
    """
    members = [node.progress for node in state.roster.members()]
    known = [(each.copies, state.now_s - each.copies_s) for each in members if each.copies]
    memory = _by_age([_aged(copies.memory, by_s) for copies, by_s in known])
    stored = _by_age([_aged(copies.storage, by_s) for copies, by_s in known])
    job = stored[0] if stored else None
    if all(copies.replicated for copies, _ in known):
        worker, node = (*memory[:2], None, None)[:2]
        return SafeCopies(worker=worker, node=node, job=job)
    replicas = _by_age([_aged(copies.replica, by_s) for copies, by_s in known])
    return SafeCopies(
        worker=memory[-1] if len(memory) == len(members) else None,
        node=replicas[-1] if len(replicas) == len(members) else None,
        job=job,
    )


def _aged(copy: StateCopy | None, by_s: float) -> StateCopy | None:
    return None if copy is None else msgspec.structs.replace(copy, age_s=copy.age_s + by_s)


def _by_age(copies: list[StateCopy | None]) -> list[StateCopy]:
    """Return the copies that there are, newest first."""
    return sorted((copy for copy in copies if copy is not None), key=lambda copy: copy.age_s)


def _node(state: State, node: KnownNode, ranks: dict[str, int]) -> NodeStatus:
    member = node.is_member
    pace = node.progress.steps_per_s(state.now_s)
    return NodeStatus(
        node_id=node.id,
        host=node.spec.local_addr or node.connection.peer_host,
        state=_state_of(node, member),
        node_rank=ranks.get(node.id) if member else None,
        local_world_size=node.spec.local_world_size,
        heard_s=max(0.0, state.now_s - node.connection.heard_s),
        progress=node.progress.steps,
        steps_per_s=0.0 if member and pace and state.incidents.stalled else pace,
    )


def _state_of(node: KnownNode, member: bool) -> str:
    if node.session is None:
        return "away"
    if node.leaving:
        return "leaving"
    if node.is_left_out:
        return "left out"
    if node.fence is None:
        return "candidate" if node.ready else "warming up"
    if member:
        return node.workers.state
    if node.place is Place.STANDBY and not node.workers.stopping:  # ready to join the current world
        return "spare" if node.workers.recoverable else "warming up"
    return "stopping"
