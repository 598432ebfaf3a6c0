"""Agents that the job's owner has given up: turned away at the door, and cut where they are in.

A pod on a node that is lost to its cluster may live, and reach the others. Once the owner has put
another in its place, it must not come back: there would be two of one. Of others the owner knows
that they are dead; nobody waits for them, or doubts what they do.
"""

from __future__ import annotations

from elastane.coordinator.rules import liveness, state_holders
from elastane.coordinator.rules.state import State
from elastane.protocol.effects import Send
from elastane.protocol.messages import Refused
from elastane.protocol.model import NodeSpec


def apply_fencing(state: State, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
    """Take note of who is fenced and who is dead, and count those out who are here."""
    state.fenced, state.dead = frozenset((*incarnations, *dead)), frozenset(dead)
    if state_holders.dead_members(state):
        state.intact = False
    state_holders.drop_dead(state)
    for node in [*state.nodes.values()]:
        refused = refuse_if_fenced(state, node.spec)
        if refused is None:
            continue
        if node.session is not None:
            state.out.append(Send(node.session, refused))
        liveness.depart(state, node, "it is fenced: the job's owner has given it up")


def refuse_if_fenced(state: State, node: NodeSpec) -> Refused | None:
    """Return why an agent is not let in, None where it is not fenced."""
    if not state.fenced.intersection((node.incarnation, node.incarnation.partition(".")[0])):
        return None
    return Refused(
        what=f"node {node.node_id} (incarnation {node.incarnation}) is fenced",
        slug="node-fenced",
        expected="an agent that the job's owner has not given up",
        next_step="nothing: another takes its place",
    )
