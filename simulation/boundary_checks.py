"""Workers that join unmodified scripts at boundaries: what must hold of each world with newcomers.

A newcomer has a place in a world for the first time. No world that follows a fault has one beside
survivors. A world with newcomers begins at a boundary where all survivors are parked at one step,
and each newcomer gets the state of that step. No world steps while a member lacks it, and none
after all of its state is gone. `history` has that no worker waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Fence, World, WorldMember
from simulation.observed import ObservedCluster
from simulation.places import Gathering, SimulatedWorker


class BoundaryCheck:
    """Which worlds ended by a fault, and who joined where."""

    def __init__(self, cluster: ObservedCluster, require: Callable[[bool, str], None]) -> None:
        self._cluster, self._require = cluster, require
        self._faulty: set[Fence] = set()  # worlds that an incident has ended
        self.joined = 0
        self.handed_again = 0  # worlds after a fault in which some members still lacked the state

    @property
    def _is_on(self) -> bool:
        return self._cluster.script.planned

    def noted(self, event: LogEvent) -> None:
        """Record that the coordinator saw a fault of the current world, or that it continues."""
        if event.kind is EventKind.INCIDENT and event.fence is not None:
            if len(self._cluster.coordinators) == 1:  # Otherwise one may be deposed.
                self._faulty.add(event.fence)
        elif event.kind is EventKind.ROUND_RESUMED and event.fence is not None:
            self._faulty.discard(event.fence)

    def commits(self, before: World | None, after: World) -> None:
        """Check a world that is recorded after another one."""
        if before is None:  # An endpoint without memory begins the job again, and all fences.
            self._faulty.clear()
            return
        if not self._is_on or before.fence not in self._faulty or after.fence == before.fence:
            return
        if not any(member.workers for member in after.members):
            return  # All workers start afresh.
        old, names = _places(before.members), _places(after.members)
        if not {*old} & {*names}:
            return  # No worker survived, so no worker has a training state that others lack.
        new = [name for name in names if name not in old]
        self._require(
            not new, f"{after.fence} follows a fault of {before.fence}, and {', '.join(new)} join"
        )

    def begins(
        self, world: Gathering, members: Sequence[SimulatedWorker], had_place: Sequence[bool]
    ) -> None:
        """Check a world whose members have met; `had_place`: in the world before it."""
        if not self._is_on or not world.in_place:
            return
        held = {w.committed for w in members if w.committed is not None}
        lacking = [w.name for w in members if w.committed is None]
        self._require(
            not lacking or len(held) == 1,
            f"{', '.join(lacking)} of {world.fence} get a state, and survivors are at {held}",
        )
        new = [w for w, had in zip(members, had_place, strict=True) if not had]
        self.joined += len(new)
        self.handed_again += bool(lacking) and not new
        old = [w for w, had in zip(members, had_place, strict=True) if had]
        apart = [f"{w.name} ({w.left})" for w in old if w.left != "parked"]
        self._require(
            not (new and apart), f"{len(new)} join {world.fence}, and not parked: {apart}"
        )
        known = [w.name for w in new if w.committed is not None]
        # An endpoint without memory may continue with the workers of an earlier world, if those
        # of the later one have all died.
        goes_on = not old and not lacking and not self._cluster.store_backed
        self._require(
            not known or goes_on, f"{', '.join(known)} join {world.fence} with a state of before"
        )

    def steps(self, world: Gathering) -> None:
        """Check a world that makes a step: all of its members are there, and at one step."""
        if not self._is_on:
            return
        at = {w.committed for w in world.workers.values() if w.world is world}
        self._require(
            len(world.workers) == world.size and len(at) == 1 and None not in at,
            f"{world.fence} of {world.size} workers makes a step with members at {at}",
        )


def _places(members: Sequence[WorldMember]) -> list[str]:
    return [f"{m.node_id}:{local_rank}" for m in members for local_rank in m.local_ranks]
