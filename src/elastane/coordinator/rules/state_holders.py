"""Who holds the state of the job: in the world in force, beside it, or out of sight.

Where workers recover in place one world follows another while members of the older one may not
have heard of it, or cannot be reached: they may go on in the older world. So nobody begins anew
from a checkpoint as long as those who hold the state may train where this coordinator cannot see
them. And those who had to give their places up hold all that the next world began with, until it
is heard to go on.

Whoever holds the state and is heard in the world in force answers for both. It was in all worlds
that may still stand, since nobody has state but those who were in each, and those who were given
it there; and it is in none of the older ones any more. Of a world before which all workers were
stopped, anybody does: no older one stands.
"""

from __future__ import annotations

from elastane.coordinator.rules.state import KnownNode, State
from elastane.protocol.limits import FENCE_WAIT_S
from elastane.protocol.messages import Heartbeat
from elastane.protocol.model import World


def record_heartbeat(state: State, node: KnownNode, message: Heartbeat) -> bool:
    """Take note that workers of `node` hold the state; return whether that is news.

    They do where they met in the world in force, or in that before it: of all others that might
    still stand, the one that they met in had left some for each.
    """
    if not state.is_member(node) or message.fence is None or state.world is None:
        return False
    in_it = message.fence == node.fence
    if not (in_it or node.uninformed) or message.met + 1 < state.world.fence.round:
        return False
    here = {i for i in node.workers if i not in node.lost}
    news = not node.holding_state.issuperset(here)
    node.holding_state |= here
    if in_it:
        news = news or bool(state.possibly_training or state.displaced)
        clear_possibly_training(state)
        if message.met == state.world.fence.round:
            state.displaced = {}
    return news


def persist_cleared_displaced(state: State) -> None:
    """Take out of the record who is no longer kept in mind."""
    if state.displaced_on_record and not state.displaced:
        state.displaced_on_record = False
        state.persist()


def clear_possibly_training(state: State) -> None:
    """No world but that in force can train any more."""
    state.possibly_training = {}


def record_ended_workers(state: State, node: KnownNode, workers: set[int]) -> None:
    """Workers of `node` have certainly ended; with one that held the state, all older worlds."""
    if state.is_member(node) and (
        node.holding_state & workers or not _continues_earlier_world(state)
    ):
        clear_possibly_training(state)


def is_dead(state: State, incarnation: str) -> bool:
    """Whether the job's owner knows that an agent and its workers have ended."""
    return not state.dead.isdisjoint((incarnation, incarnation.partition(".")[0]))


def dead_members(state: State) -> set[str]:
    """Return the ids of those nodes of the world in force whose agents in it are dead."""
    if not state.dead or state.world is None:
        return set()
    return {m.node_id for m in state.world.members if is_dead(state, m.incarnation)}


def drop_dead(state: State) -> None:
    """The dead do not go on anywhere."""
    state.possibly_training = {
        node_id: (since_s, incarnation)
        for node_id, (since_s, incarnation) in state.possibly_training.items()
        if not is_dead(state, incarnation)
    }


def note_possibly_training(state: State, node_id: str, incarnation: str) -> None:
    """Workers of this node may go on where nobody sees them."""
    if (state.in_place or state.was_in_place) and not is_dead(state, incarnation):
        state.possibly_training[node_id] = (state.now_s, incarnation)


def record_all_released(state: State) -> None:
    """Record that no worker of the world in force is left, before the last node is released.

    The next coordinator has no other way to know: those nodes may never come back, as where a job
    that was suspended is resumed with fewer pods.
    """
    if state.world is not None and not (
        state.intact or state.possibly_training or state.all_released
    ):
        state.all_released = True
        state.persist()


def note_accounted(state: State, node: KnownNode) -> None:
    """Its workers are known again: they are gone, or this coordinator leads them."""
    state.possibly_training.pop(node.id, None)


def possibly_training_until_s(state: State) -> float:
    """Return until when workers may go on where nobody sees them; 0: none do."""
    if not (state.store_backed and state.possibly_training):
        return 0.0
    return max(since_s for since_s, _ in state.possibly_training.values()) + FENCE_WAIT_S


def returning_until_s(state: State) -> float:
    """Return until when nodes may come back with workers that are able; 0: none may.

    Of those in doubt, and of the world in force, where a new coordinator went on without some.
    """
    members = state.world.members if state.world is not None else ()
    lacking = any(not (m.node_id in state.nodes or is_dead(state, m.incarnation)) for m in members)
    late_s = state.resumed_without_s + FENCE_WAIT_S if state.resumed_without_s and lacking else 0.0
    return max(possibly_training_until_s(state), late_s)


def state_wait_until_s(state: State) -> float:
    """Return until when the state may be with workers out of sight alone; 0: it is not."""
    if any(rules_out_older_worlds(state, node) for node in state.members()):
        return 0.0
    return possibly_training_until_s(state)


def must_wait_for_state(state: State) -> bool:
    """Whether to wait for those out of sight; asks for a tick at the end of the wait."""
    due_s = state_wait_until_s(state)
    if state.now_s >= due_s:
        if due_s:
            clear_possibly_training(state)  # By now they have stopped themselves.
        return False
    state.wait_until(due_s)
    return True


def record_displaced(state: State, before: World, after: World) -> None:
    """Keep in mind who holds the state that the world in force begins with, and has no place."""
    inside = {member.node_id for member in after.members}
    names = [member.node_id for member in before.members] + [*state.displaced]
    outside = [i for i in names if i not in inside and i in state.nodes]
    for node_id in outside:
        state.nodes[
            node_id
        ].holding_state.clear()  # In this world others may make steps without it.
    state.displaced = {node_id: rank for rank, node_id in enumerate(dict.fromkeys(outside))}
    state.displaced_on_record = bool(state.displaced)


def is_displaced_holder(state: State, node: KnownNode) -> bool:
    """Whether `node` has no place, and holds the state that the world in force began with."""
    return node.id in state.displaced and node.standby and bool(node.recoverable) and not node.stale


def rules_out_older_worlds(state: State, node: KnownNode) -> bool:
    """Whether no world but that in force can make a step without a worker of this node."""
    return bool(
        node.holding_state.intersection(node.survivors)
        if _continues_earlier_world(state)
        else node.survivors
    )


def _continues_earlier_world(state: State) -> bool:
    """Whether the world in force follows one of which nobody was stopped.

    Only such a world says which workers of a node have places in it; all its members do.
    """
    return state.world is not None and any(member.workers for member in state.world.members)
