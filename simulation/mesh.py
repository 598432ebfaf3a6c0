"""Sharded state of simulated workers: which node holds which slice, and what a world lacks.

As in the library, a node keeps its slice while its workers live, and a joining node takes a free
one. A step is applied once all hold their reductions. So a worker that was interrupted before it
applied a step of the others can apply it alone. With replicas within a node, each node has all
slices.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from elastane.protocol.model import NO_SLICE, Fence, Sharding
from simulation.clock import VirtualClock
from simulation.places import Gathering, InPlaceGroup, SimulatedWorker


class Mesh:
    """Replicas of `span` nodes; 0: the state is not sharded. `tell` reports recoverable workers."""

    def __init__(
        self,
        span: int,
        clock: VirtualClock,
        rng: random.Random,
        tell: Callable[[InPlaceGroup], None],
    ) -> None:
        self.span, self._clock, self._rng, self._tell = span, clock, rng, tell

    def said(self, group: InPlaceGroup) -> Sharding | None:
        """Return what the workers of a node report of their sharded state."""
        return Sharding(group.sole, self.span, group.part, group.level) if self.span else None

    def assign(self, world: Gathering, members: Sequence[SimulatedWorker]) -> bool:
        """Agree on slices; False if the members can neither step nor come to one step."""
        if self.span < 2 or _seated(members, self.span):
            return True
        world.is_uneven = all(worker.group.part != NO_SLICE for worker in members)
        return world.is_uneven

    def advance(self, members: Sequence[SimulatedWorker], base: int) -> None:
        """Let members apply a step of the others, if they hold all that it takes."""
        for worker in members if self.span > 1 else ():
            if worker.ready and worker.committed == base - 1:
                worker.committed = base

    def is_lost(self, members: Sequence[SimulatedWorker], base: int) -> bool:
        """Whether no member holds some shard at this step."""
        if self.span < 2:
            return any(worker.group.lacks for worker in members)
        held = {shard(worker) for worker in members if worker.committed == base}
        return len(held) < self.span * max(worker.group.size for worker in members)

    def can_give(self, world: Gathering, worker: SimulatedWorker) -> bool:
        """Whether a member has what this worker needs; a checkpoint is always there."""
        return not world.from_state or any(
            peer.world is world
            and peer.committed == world.base
            and (self.span < 2 or shard(peer) == shard(worker))
            for peer in world.workers.values()
        )

    def level_without_slices(self, members: Sequence[SimulatedWorker], fence: Fence) -> None:
        """Let the members of a first world without whole replicas report that none is ahead."""
        if all(worker.group.part == NO_SLICE for worker in members):
            for worker in members:
                worker.group.level, worker.begins_apart = fence, not worker.joined

    def level(self, world: Gathering) -> None:
        """Bring all members to the last one's step; then this world has nothing more to do."""
        members = [*world.workers.values()]
        if not world.all_are("healing") or any(w.committed != world.base for w in members):
            return
        for worker in members:
            worker.stage, worker.met = "level", world.fence.round
        for group in dict.fromkeys(worker.group for worker in members):
            group.level = world.fence
            delay_s = 0.001 + self._rng.random() * 0.01
            self._clock.after(delay_s, lambda g=group: self._tell(g))  # type: ignore[misc]


def shard(worker: SimulatedWorker) -> tuple[int, int]:
    """Return the identity of a worker's shard."""
    return worker.group.part, worker.local_rank


def _seated(members: Sequence[SimulatedWorker], span: int) -> bool:
    """Give slices to members without one; False if the members are not whole replicas."""
    groups = [*dict.fromkeys(worker.group for worker in members)]
    held = Counter(group.part for group in groups)
    free = held.pop(NO_SLICE, 0)
    count, left = divmod(len(groups), span)
    lacking = [part for part in range(span) for _ in range(count - held[part])]
    if left or len(lacking) != free:
        return False
    for group in groups:
        if group.part == NO_SLICE:
            group.part = lacking.pop(0)
    return True
