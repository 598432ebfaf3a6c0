"""Which workers hold the training state: in the current world, displaced from it, or out of sight.

Where workers recover in place, one world follows another while members of the older one may not
know of it, or cannot be reached. They may train on in the older world. So no worker starts from a
checkpoint while a state holder may train where this coordinator cannot see it. Displaced nodes hold
everything that the next world began with, until that world is known to make steps.

A state holder that reports from the current world proves two things. The state is safe: only
members of each world, and workers healed there, hold it. And no older world can step, since this
worker is needed in each of them and is in none any more. If all workers were stopped before the
current world, any of its members is such a proof.
"""

from __future__ import annotations

from elastane.coordinator.rules.state import KnownNode, State
from elastane.protocol.limits import FENCE_WAIT_S
from elastane.protocol.messages import Heartbeat
from elastane.protocol.model import World


def record_heartbeat(state: State, node: KnownNode, message: Heartbeat) -> bool:
    """Record which workers of `node` hold the state; return whether that is new.

    They do if they last met their peers in the current world, or in the one before it. Every other
    world that could still exist lacks some workers that met in one of these.
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
    """Update the durable record once it names displaced nodes that are no longer needed."""
    if state.displaced_on_record and not state.displaced:
        state.displaced_on_record = False
        state.persist()


def clear_possibly_training(state: State) -> None:
    """Record that no world but the current one can train any more."""
    state.possibly_training = {}


def record_ended_workers(state: State, node: KnownNode, workers: set[int]) -> None:
    """Record that workers of `node` have ended; if one held the state, no older world can train."""
    if state.is_member(node) and (
        node.holding_state & workers or not _continues_earlier_world(state)
    ):
        clear_possibly_training(state)


def is_dead(state: State, incarnation: str) -> bool:
    """Whether the job's owner knows that an agent and its workers have ended."""
    return not state.dead.isdisjoint((incarnation, incarnation.partition(".")[0]))


def dead_members(state: State) -> set[str]:
    """Return the members of the current world whose agents are known to be dead."""
    if not state.dead or state.world is None:
        return set()
    return {m.node_id for m in state.world.members if is_dead(state, m.incarnation)}


def drop_dead(state: State) -> None:
    """Forget nodes out of sight that the owner knows to be dead: they train nowhere."""
    state.possibly_training = {
        node_id: (since_s, incarnation)
        for node_id, (since_s, incarnation) in state.possibly_training.items()
        if not is_dead(state, incarnation)
    }


def note_possibly_training(state: State, node_id: str, incarnation: str) -> None:
    """Record that workers of this node may still train out of sight."""
    if (state.in_place or state.was_in_place) and not is_dead(state, incarnation):
        state.possibly_training[node_id] = (state.now_s, incarnation)


def record_all_released(state: State) -> None:
    """Record that no worker of the current world is left, before the last node is released.

    A later coordinator cannot know it otherwise: the nodes may never come back, for instance if a
    suspended job is resumed with fewer pods.
    """
    if state.world is not None and not (
        state.intact or state.possibly_training or state.all_released
    ):
        state.all_released = True
        state.persist()


def note_accounted(state: State, node: KnownNode) -> None:
    """Record that no worker of `node` is out of sight: they ended, or report here."""
    state.possibly_training.pop(node.id, None)


def possibly_training_until_s(state: State) -> float:
    """Return until when workers may train out of sight; 0: there are none."""
    if not (state.store_backed and state.possibly_training):
        return 0.0
    return max(since_s for since_s, _ in state.possibly_training.values()) + FENCE_WAIT_S


def returning_until_s(state: State) -> float:
    """Return until when nodes may come back with workers that can join; 0: none may.

    That counts nodes out of sight, and members without which a new coordinator resumed the job.
    """
    members = state.world.members if state.world is not None else ()
    lacking = any(not (m.node_id in state.nodes or is_dead(state, m.incarnation)) for m in members)
    late_s = state.resumed_without_s + FENCE_WAIT_S if state.resumed_without_s and lacking else 0.0
    return max(possibly_training_until_s(state), late_s)


def state_wait_until_s(state: State) -> float:
    """Return until when only workers out of sight may hold the state; 0: others hold it."""
    if any(rules_out_older_worlds(state, node) for node in state.members()):
        return 0.0
    return possibly_training_until_s(state)


def must_wait_for_state(state: State) -> bool:
    """Whether to wait for workers out of sight; requests a tick at the end of the wait."""
    due_s = state_wait_until_s(state)
    if state.now_s >= due_s:
        if due_s:
            clear_possibly_training(state)  # By now those workers have stopped themselves.
        return False
    state.wait_until(due_s)
    return True


def record_displaced(state: State, before: World, after: World) -> None:
    """Record which nodes hold the state that the next world begins with and have no place in it."""
    inside = {member.node_id for member in after.members}
    names = [member.node_id for member in before.members] + [*state.displaced]
    outside = [i for i in names if i not in inside and i in state.nodes]
    for node_id in outside:
        state.nodes[
            node_id
        ].holding_state.clear()  # The new world may make steps without this node.
    state.displaced = {node_id: rank for rank, node_id in enumerate(dict.fromkeys(outside))}
    state.displaced_on_record = bool(state.displaced)


def is_displaced_holder(state: State, node: KnownNode) -> bool:
    """Whether `node` has no place and holds the state that the current world began with."""
    return node.id in state.displaced and node.standby and bool(node.recoverable) and not node.stale


def rules_out_older_worlds(state: State, node: KnownNode) -> bool:
    """Whether no world but the current one can make a step without a worker of this node."""
    return bool(
        node.holding_state.intersection(node.survivors)
        if _continues_earlier_world(state)
        else node.survivors
    )


def _continues_earlier_world(state: State) -> bool:
    """Whether the current world follows one whose workers were not stopped.

    Only the members of such a world name the workers that take part.
    """
    return state.world is not None and any(member.workers for member in state.world.members)
