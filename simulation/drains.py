"""Drains of simulated workers that recover in place: all stop at one boundary, or save there.

A save belongs to all workers of a world: each waits until the others have arrived or are gone.
"""

from __future__ import annotations

from collections.abc import Callable

from elastane.protocol.events import GroupDrained, GroupMarked
from simulation.clock import VirtualClock
from simulation.places import Gathering, InPlaceGroup, SimulatedWorker


class Drains:
    """Those of one job; `save` takes the step of a state that was saved.

    None: the script is unmodified, so its workers only park.
    """

    def __init__(self, clock: VirtualClock, save: Callable[[int], None] | None) -> None:
        self._clock, self._save = clock, save

    def mark(self, group: InPlaceGroup, drain: int) -> None:
        """Gate the workers, and tell the boundary to which the furthest has come."""
        group.gated, group.drain, fence = True, drain, group.fence
        calls = group.furthest
        if calls is not None:
            calls += 1  # As pages have it: the boundary before the first step is number 1.
        self._clock.after(0.003, lambda: group.feed(GroupMarked(fence, drain, calls)))

    def aim(self, group: InPlaceGroup, calls: int | None, *, stops: bool) -> None:
        """Let all workers park at boundary `calls`, counted from 1; and save, where it `stops`."""
        group.target = None if calls is None else calls - 1
        group.aimed_s, group.stops, group.drained = self._clock.now_s, stops, False
        self.mind(group)

    def mind(self, group: InPlaceGroup) -> None:
        """Report once all workers of a node are parked, or cannot be asked."""
        self._mind(group)
        for world in _worlds_of(group):
            self.mind_all(world)

    def mind_all(self, world: Gathering) -> None:
        """The same of all nodes of a world: of what one does others may have waited for."""
        for group in [*{id(w.group): w.group for w in world.workers.values()}.values()]:
            self._mind(group)

    def _mind(self, group: InPlaceGroup) -> None:
        if group.aimed_s is None or group.drained or group.phase != "running":
            return
        if group.target is not None:
            if any(w.stage != "parked" for w in group.placed()):
                return
            saves = group.stops and self._save is not None
            if saves and not all(map(self._is_saved, _worlds_of(group))):
                return
        group.drained = True
        done = GroupDrained(group.fence, group.drain, group.stops)
        self._clock.after(0.002, lambda: group.feed(done))

    def release(self, group: InPlaceGroup) -> list[SimulatedWorker]:
        """Open the gates of a drain that was called off; return the workers that were parked."""
        group.gated, group.target, group.aimed_s = False, None, None
        group.stops = group.drained = False
        return [w for w in group.placed() if w.stage == "parked"]

    def _is_saved(self, world: Gathering) -> bool:
        """Whether a save is over; it fails if a worker is lost."""
        members = [*world.workers.values()]
        if len(members) < world.size or any(w.world is not world for w in members):
            return True
        if not all(w.stage == "parked" and w.group.stops for w in members):
            return False
        assert self._save is not None
        self._save(members[0].calls)
        return True


def _worlds_of(group: InPlaceGroup) -> list[Gathering]:
    return [*{id(w.world): w.world for w in group.placed() if w.world is not None}.values()]
