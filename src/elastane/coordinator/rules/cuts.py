"""Members that do not reach one another, although each of them reaches the coordinator.

No world with both nodes of such a pair makes a step: a firewall, a wrong network card or a broken
path is between them. Agents report the addresses that do not answer their workers' connections, and
workers report the address to which they could not connect. A world whose workers had met is
followed by one of the same members, because only its connections may be dead. Otherwise the job
continues without the nodes that most others do not reach, if enough nodes are left. If too few
would be left, the worlds are tried again, and the job ends once none has made a step for
join_timeout.

A node that is left out may join again after a pause, which doubles. Meanwhile the agent that did
not reach the other one probes that address. Once it answers, the pause is over, the first time at
once; while it does not, the node stays out for longer than its pause, up to LEFT_OUT_MAX_S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastane.coordinator.rules import next_world, sizing
from elastane.coordinator.rules.changes import LeftOutNode, SilentPair
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import KnownNode, named
from elastane.coordinator.rules.state import MembershipPhase, State
from elastane.protocol.diagnosis import is_lost_peer, unreached_address
from elastane.protocol.limits import PROBES_MAX
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Probe, ProbeResult

# What lets them continue; the incident and the log show it.
ADVICE = (
    "let the nodes connect to one another on all TCP ports, or name their common network"
    " (--local-addr, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); elastane doctor --nodes tries each"
    " pair"
)
# A text names this many pairs; more help no reader.
_NAMED_MAX = 4
# For each node that is left out, at most this many pairs are probed. Once these are reached, its
# other pairs count as reached.
_PROBED_MAX = 4


@dataclass(frozen=True, slots=True)
class Unanswered:
    """An address that does not answer a member; `other` is its node, empty if none is known.

    `refuses`: a connection to it was refused, perhaps by a firewall, which would answer a probe.
    """

    node: str
    other: str
    address: str
    refuses: bool = False

    @property
    def text(self) -> str:
        """The pair in words."""
        to = f"node {self.other} at {self.address}" if self.other else self.address
        return f"node {self.node} does not reach {to}"


def found(state: State) -> list[Unanswered]:
    """Return the addresses that do not answer members of the current world."""
    pairs = [
        Unanswered(
            node.id, _node_at(state, node, address), address, node.progress.is_refused_by(address)
        )
        for node in state.roster.members()
        for address in node.progress.unreached
    ]
    return [each for each in pairs if each.other or not _is_own(state, each)]


def text(pairs: Sequence[Unanswered]) -> str:
    """Say which nodes do not reach which addresses; empty if all are reached."""
    more = f", and {len(pairs) - _NAMED_MAX} more" if len(pairs) > _NAMED_MAX else ""
    return ", ".join(each.text for each in pairs[:_NAMED_MAX]) + more


def surplus(pairs: Iterable[tuple[str, str]], order: Sequence[str]) -> list[str]:
    """Return nodes without which no pair is left: each time the one in most pairs.

    Of several the last in `order`, so that ranks change least.
    """
    left = {frozenset(pair) for pair in pairs}
    place = {node_id: at for at, node_id in enumerate(order)}
    chosen = list[str]()
    while left:
        counts = Counter(node_id for pair in left for node_id in pair)
        worst = max(counts, key=lambda node_id: (counts[node_id], place[node_id]))
        chosen.append(worst)
        left = {pair for pair in left if worst not in pair}
    return chosen


def leave_out(state: State) -> str:
    """Leave out nodes so that the others reach one another; return why, empty if none is left out.

    If the workers of this world had met, only nodes that were left out before are.
    """
    assert state.world is not None
    had_met = state.in_place.active and any(
        node.progress.met == state.world.fence.round for node in state.roster.members()
    )
    return _leave_out(state, found(state), had_met=had_met)


def leave_out_failed(state: State, incident: Incident) -> str:
    """Leave out nodes after workers that start afresh could not connect to others.

    A connection that was refused proves nothing: the other worker may have ended.
    """
    pairs = list[Unanswered]()
    for sighting in incident.sightings:
        said = sighting.failure.message
        address = "" if "refused" in said else unreached_address(said)
        node = state.roster.nodes.get(sighting.node_id)
        if address and node is not None:
            pairs.append(Unanswered(node.id, _node_at(state, node, address), address))
        elif not is_lost_peer(sighting.failure):
            return ""
    return _leave_out(state, pairs, had_met=False)


def stands_still(state: State) -> bool:
    """Whether workers that start afresh make no collective, and some are not reached."""
    assert state.world is not None
    if state.in_place.active or len(state.roster.at_standstill) < len(state.world.members):
        return False
    if any(node.progress.is_early for node in state.roster.members()):
        return False
    return any(each.other for each in found(state))


def readmit(state: State) -> None:
    """Let nodes join again whose pause is over, or without which there are too few."""
    for node_id, left in [*state.left_out.nodes.items()]:
        node = state.roster.nodes.get(node_id)
        why = _why_readmitted(state, left)
        if not why and node is not None and _is_needed(state):
            why = "the job has too few nodes without it"
        if why:
            state.left_out.readmit(node_id)
            if node is not None:
                state.log(EventKind.NODE_READMITTED, why, node_id)
                node.let_in()
                state.roster.reindex(node)
                state.gathering.note_arrival(state.now_s)
            continue
        state.queue.wait_until(_next_s(state, left))
        if node is not None and not node.is_left_out:
            node.leave_out()  # Its agent has registered again.
            state.roster.reindex(node)


def probes(state: State, node: KnownNode) -> tuple[Probe, ...]:
    """Return the addresses that the agent of `node` is to probe, for nodes that are left out."""
    found = list[Probe]()
    for number, pair in state.left_out.asked_of(node.id)[:PROBES_MAX]:
        other = state.roster.nodes.get(pair.other)
        if other is not None and other.session is not None:
            found.append(Probe(pair.address, other.offer.port, number))
    return tuple(found)


def record_probes(state: State, node: KnownNode, results: Sequence[ProbeResult]) -> bool:
    """Record what an agent's probes found; return whether that is new."""
    found = {(each.probe.number, each.probe.address): each.answers for each in results}
    is_new = False
    for number, pair in state.left_out.asked_of(node.id):
        answers = found.get((number, pair.address), pair.answers)
        is_new = is_new or answers is not pair.answers
        pair.answers = answers
    return is_new


def _why_readmitted(state: State, left: LeftOutNode) -> str:
    """Return why a node may join again; empty if it may not."""
    nodes = state.roster.nodes  # A node that has gone is in no pair of the next world.
    here = [pair for pair in left.pairs if pair.asking in nodes and pair.other in nodes]
    names = ", ".join(f"{pair.asking} to {pair.other} at {pair.address}" for pair in here)
    if len(here) == len(left.pairs) > 0 and all(pair.answers for pair in here):
        if state.now_s >= left.trusted_from_s:
            return f"probes are answered: {names}"
    elif state.now_s < left.latest_s and any(pair.answers is False for pair in here):
        return ""
    if state.now_s < left.until_s:
        return ""
    return "its pause is over" + f"; did not answer: {names}" * bool(names)


def _next_s(state: State, left: LeftOutNode) -> float:
    """Return when a node may join again if no report comes before."""
    times = (left.trusted_from_s, left.until_s, left.latest_s)
    return min(at_s for at_s in times if at_s > state.now_s)


def _is_needed(state: State) -> bool:
    if state.phase not in (MembershipPhase.FORMING, MembershipPhase.REGROUPING):
        return False
    others = [n for n in state.roster.nodes.values() if n.session and not n.is_left_out]
    return len(others) < sizing.fewest_nodes(state)


def _leave_out(state: State, pairs: Sequence[Unanswered], *, had_met: bool) -> str:
    assert state.world is not None
    # Of two, the one without the state is left out: the others could only begin again without it.
    holders = {node.id for node in state.roster.members() if node.holds_state}
    order = sorted((m.node_id for m in state.world.members), key=lambda i: i not in holders)
    known = [(each.node, each.other) for each in pairs if {each.node, each.other} <= {*order}]
    chosen = [state.roster.nodes[node_id] for node_id in surplus(known, order)]
    if not chosen or (had_met and not any(state.left_out.times[node.id] for node in chosen)):
        return ""
    _mark(state, chosen, left_out=True)
    if not _are_enough(state, chosen):
        _mark(state, chosen, left_out=False)
        return ""
    for node in chosen:
        probed = _probed(pairs, node.id)
        left = state.left_out.add(node.id, state.now_s, probed)
        own = text([each for each in pairs if node.id in (each.node, each.other)])
        data = {"pause_s": left.until_s - state.now_s, "probes": len(probed)}
        state.log(EventKind.NODE_LEFT_OUT, own, node.id, **data)
    ids = [node.id for node in chosen]
    return f"{text(pairs)}; the job continues without {named(ids)}; {ADVICE}"


def _probed(pairs: Iterable[Unanswered], node_id: str) -> tuple[SilentPair, ...]:
    """Return the pairs to probe for a node that is left out; none if that proves nothing."""
    own = [each for each in pairs if each.other and node_id in (each.node, each.other)]
    if any(each.refuses for each in own):
        return ()
    return tuple(SilentPair(each.node, each.other, each.address) for each in own[:_PROBED_MAX])


def _mark(state: State, nodes: Iterable[KnownNode], *, left_out: bool) -> None:
    for node in nodes:
        node.leave_out() if left_out else node.let_in()
        state.roster.reindex(node)


def _are_enough(state: State, without: Sequence[KnownNode]) -> bool:
    """Whether a world can follow without these nodes; spares may have to start workers first."""
    if state.in_place.active:
        here = [n for n in state.roster.nodes.values() if n.session and not n.leaving]
        others = [n for n in here if not n.is_left_out]
        return len(others) >= sizing.fewest_nodes(state) or next_world.are_enough(
            state, next_world.next_world(state)
        )
    members = [n for n in state.roster.members() if n.session and not n.leaving]
    staying = {n.id for n in members} - {n.id for n in without}
    return len(staying | state.roster.idle) >= sizing.fewest_nodes(state)


def _node_at(state: State, asking: KnownNode, address: str) -> str:
    """Return the other node that has this address; empty if none or several have it."""
    ids = {n.id for n in state.roster.nodes.values() if address in _addresses(state, n)}
    ids.discard(asking.id)
    return ids.pop() if len(ids) == 1 else ""


def _is_own(state: State, each: Unanswered) -> bool:
    return each.address in _addresses(state, state.roster.nodes[each.node])


def _addresses(state: State, node: KnownNode) -> set[str]:
    """Return the addresses at which a node is known; a node beside the coordinator has its."""
    host = node.connection.peer_host.removeprefix("::ffff:")
    beside = next_world.is_loopback(host)
    others = [n.connection for n in state.roster.nodes.values() if beside and n is not node]
    return {
        *node.spec.addresses,
        node.spec.local_addr,
        host,
        *(c.local_host.removeprefix("::ffff:") for c in others if c.peer_host != host),
    } - {""}
