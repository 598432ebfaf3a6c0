"""When the coordinator of a node steps down, because too few nodes reach it.

Behind a cut network the lost nodes may reach one another and the store, but not this host: one of
them should lead. If none takes over, this node leads again, and steps down again after twice the
time: the other nodes may have come late. Pure; the simulation has the same rule.
"""

from dataclasses import dataclass

from elastane.protocol.limits import STEP_DOWN_S, Timing
from elastane.protocol.model import Fence

# The share of join_timeout after which a coordinator that leads again steps down at the latest.
_LONGEST_SHARE = 0.1


@dataclass(slots=True)
class StepDowns:
    """How often the coordinators of one node stepped down for lack of nodes, and since when.

    They belong to one shortage as long as the world is the same, and no other coordinator is found.
    """

    timing: Timing
    _world: Fence | None = None
    _times: int = 0
    _since_s: float = 0.0

    def is_due(self, world: Fence | None, short_s: float) -> bool:
        """Return whether a coordinator steps down that has had too few nodes for `short_s`."""
        longest_s = max(STEP_DOWN_S, self.timing.join_timeout_s * _LONGEST_SHARE)
        times = self._times if world == self._world else 0
        return short_s >= min(STEP_DOWN_S * 2.0**times, longest_s)

    def note(self, world: Fence | None, short_s: float, now_s: float) -> None:
        """Record that the coordinator steps down, in monotonic seconds of this host."""
        if not self._times or world != self._world:
            self._world, self._times, self._since_s = world, 0, now_s - short_s
        self._times += 1

    def forget(self) -> None:
        """Begin anew: this node has found another coordinator."""
        self._times = 0

    def waited_s(self, world: Fence | None, now_s: float) -> float:
        """Return for how long the job has been short of nodes as a term of this node begins.

        It counts against join_timeout, which would never end otherwise.
        """
        return now_s - self._since_s if self._times and world == self._world else 0.0

    @property
    def pauses(self) -> bool:
        """Whether this node lets others stand first, since its coordinator stepped down."""
        return self._times > 0
