"""Which workers hold the training state: of the current world, displaced from it, or unreachable.

Where workers recover in place, one world follows another while members of the older one may be
unreachable or uninformed, and may train on in it. So no worker starts from a checkpoint while an
unreachable state holder may train. Displaced nodes hold everything that the next world began with,
until that world is known to make steps.

A state holder that reports from the current world proves two things. The state is safe: only
members of each world, and workers healed there, hold it. And no older world can step, since this
worker is needed in each of them and is in none any more. If all workers were stopped before the
current world, any of its members is such a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from elastane.coordinator.rules.nodes import KnownNode, Place
from elastane.protocol.messages import Heartbeat
from elastane.protocol.model import World


@dataclass(slots=True)
class StateHolders:
    """The nodes outside the current world whose workers hold the state, or may train on."""

    store_backed: bool  # without a store, nothing waits for unreachable workers
    fence_wait_s: float  # by then an unreachable world has stopped itself
    # Unreachable nodes whose workers may still train: since when, and which incarnation.
    possibly_training: dict[str, tuple[float, str]] = field(default_factory=dict)
    # Nodes that hold the state that the current world began with, without a place in it: their
    # order.
    displaced: dict[str, int] = field(default_factory=dict)
    displaced_on_record: bool = False  # the durable record names displaced nodes
    resumed_without_s: float = 0.0  # when this coordinator resumed without members that may return

    def load(self, displaced: tuple[str, ...]) -> None:
        """Take the displaced nodes of the job's record."""
        self.displaced = {node_id: rank for rank, node_id in enumerate(displaced)}
        self.displaced_on_record = bool(displaced)

    def record_heartbeat(self, node: KnownNode, message: Heartbeat, world: World | None) -> bool:
        """Record which workers of `node` hold the state; return whether that is new.

        They do if they last met their peers in the current world, or in the one before it. Every
        other world that could still exist lacks some workers that met in one of these.
        """
        if not node.is_member or message.fence is None or world is None:
            return False
        in_it = message.fence == node.fence
        if not (in_it or node.is_uninformed) or message.met + 1 < world.fence.round:
            return False
        news = node.workers.hold_state()
        if in_it:
            news = news or bool(self.possibly_training or self.displaced)
            self.clear_possibly_training()
            if message.met == world.fence.round:
                self.displaced = {}
        return news

    def record_ended_workers(self, node: KnownNode, workers: set[int], world: World | None) -> None:
        """Record that workers have ended; if one held the state, no older world can train."""
        held = node.workers.holding_state & workers
        if node.is_member and (held or not _continues_earlier_world(world)):
            self.clear_possibly_training()

    def note_possibly_training(self, node_id: str, incarnation: str, now_s: float) -> None:
        """Record that workers of this unreachable node may still train."""
        self.possibly_training[node_id] = (now_s, incarnation)

    def note_accounted(self, node: KnownNode) -> None:
        """Record that the workers of `node` are accounted for: they ended, or report here."""
        self.possibly_training.pop(node.id, None)

    def drop_dead(self, is_dead: Callable[[str], bool]) -> None:
        """Forget unreachable nodes that the owner knows to be dead: they train nowhere."""
        for node_id, (_, incarnation) in [*self.possibly_training.items()]:
            if is_dead(incarnation):
                del self.possibly_training[node_id]

    def clear_possibly_training(self) -> None:
        """Record that no world but the current one can train any more."""
        self.possibly_training = {}

    def note_resumed_without(self, now_s: float) -> None:
        """Record that a new coordinator continues without members that may return."""
        self.resumed_without_s = now_s

    def displace(self, before: World, after: World, nodes: Mapping[str, KnownNode]) -> None:
        """Record the nodes that hold the state of the next world, and have no place in it."""
        inside = {member.node_id for member in after.members}
        names = [member.node_id for member in before.members] + [*self.displaced]
        outside = [i for i in names if i not in inside and i in nodes and not nodes[i].has_lost_all]
        for node_id in outside:
            # The new world may make steps without this node.
            nodes[node_id].workers.give_up_state()
        self.displaced = {node_id: rank for rank, node_id in enumerate(dict.fromkeys(outside))}
        self.displaced_on_record = bool(self.displaced)

    def start_afresh(self) -> None:
        """Record that the next world begins from a checkpoint: no node is a displaced holder."""
        self.displaced = {}
        self.clear_possibly_training()

    def is_record_outdated(self) -> bool:
        """Whether the durable record names displaced nodes that are no longer needed."""
        return self.displaced_on_record and not self.displaced

    def note_recorded(self) -> None:
        """Record that the durable record names no displaced nodes."""
        self.displaced_on_record = False

    def is_displaced_holder(self, node: KnownNode) -> bool:
        """Whether `node` has no place and holds the state that the current world began with."""
        here = node.id in self.displaced and node.place is Place.STANDBY
        return here and bool(node.workers.recoverable)

    def possibly_training_until_s(self) -> float:
        """Return until when unreachable workers may train; 0: there are none."""
        since = [since_s for since_s, _ in self.possibly_training.values()]
        return max(since) + self.fence_wait_s if since and self.store_backed else 0.0

    def wait_until_s(self, members: Iterable[KnownNode], world: World | None) -> float:
        """Return until when only unreachable workers may hold the state; 0: others hold it."""
        if any(rules_out_older_worlds(node, world) for node in members):
            return 0.0
        return self.possibly_training_until_s()


def rules_out_older_worlds(node: KnownNode, world: World | None) -> bool:
    """Whether no world but the current one can make a step without a worker of this node."""
    if _continues_earlier_world(world):
        return node.holds_state
    return bool(node.survivors)


def _continues_earlier_world(world: World | None) -> bool:
    """Whether the current world follows one whose workers were not stopped.

    Only the members of such a world name the workers that take part.
    """
    return world is not None and any(member.workers for member in world.members)
