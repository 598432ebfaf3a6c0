"""How many nodes the job may have, where its owner changes that while it runs.

A range counts from the next world on. Nobody is stopped for a minimum that was raised; for a
maximum that was lowered, those of the highest ranks give way at a step's boundary, and wait as
spares. Where nodes are taken away along with it, as a scheduler does, they leave by themselves a
moment later: that moment is waited for, so that the others are interrupted once. Until then a
world of survivors has as many as are left (`regroup`): each of them may hold what nobody else does.
"""

from __future__ import annotations

import msgspec

from elastane.coordinator.rules import replica_slices
from elastane.coordinator.rules.state import State
from elastane.coordinator.rules.words import named
from elastane.protocol.log_events import EventKind


def apply_range(state: State) -> None:
    """Put the range in force that was asked for."""
    wanted, state.wanted = state.wanted, None
    if wanted is None or state.spec.static or state.outcome is not None:
        return
    before = (state.spec.min_nodes, state.spec.max_nodes)
    if wanted == before and state.resized:
        return
    state.resized = True
    if wanted != before:
        minimum, maximum = wanted
        state.spec = msgspec.structs.replace(state.spec, min_nodes=minimum, max_nodes=maximum)
        state.resized_s = state.now_s
        reason = f"{minimum} to {maximum} nodes, in place of {before[0]} to {before[1]}"
        state.tell(EventKind.RESIZED, reason, min_nodes=minimum, max_nodes=maximum)
    state.persist()


def reason_to_shrink(state: State) -> str:
    """Return why nodes are to give their places up now; empty: none, or not yet."""
    assert state.world is not None
    gone = sorted(i for i in state.leaving & state.holding if state.is_member(state.nodes[i]))
    if gone:
        return f"{named(gone)} to leave ({named({state.nodes[i].leaving for i in gone})})"
    surplus = [m.node_id for m in state.world.members[replica_slices.most_nodes(state) :]]
    if not surplus:
        return ""
    due_s = state.resized_s + state.spec.timing.gather_max_s
    if state.now_s < due_s:
        state.wait_until(due_s)
        return ""
    limit = f"at most {state.spec.max_nodes} nodes"
    if state.span > 1:
        limit += f", in whole replicas of {state.span}"
    return f"{limit}: {named(surplus)} give way"


def drained_late(state: State) -> None:
    """Not all workers came to the boundary in time; nobody is beyond those that did.

    Where none did, any may be a step ahead: nobody gives way then, and it is tried later.
    """
    assert state.incident is not None
    if not any(node.drained for node in state.members()):
        state.incident.planned, state.resized_s = False, state.now_s
