"""When the coordinator of a node steps down, because too few nodes reach it.

Behind a cut network the lost nodes may reach one another and the store, but not this host: one of
them should lead. If none is elected, this node leads again, and steps down after twice the time,
because the other nodes may have come late. Pure.
"""

from dataclasses import dataclass

from elastane.protocol.limits import STEP_DOWN_S, Timing
from elastane.protocol.model import Fence

# The share of join_timeout after which a coordinator that leads again steps down at the latest.
_LONGEST_SHARE = 0.1


@dataclass(slots=True)
class StepDowns:
    """How often the coordinators of one node stepped down for lack of nodes, and since when.

    The count is of one shortage: it ends with the next world, or once this node has found another
    coordinator.
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
        """Count from zero, since this node has found another coordinator."""
        self._times = 0

    def waited_s(self, world: Fence | None, now_s: float) -> float:
        """Return for how long the job has been short of nodes when a term of this node begins.

        This time counts against join_timeout. Otherwise each term would wait for all of it.
        """
        return now_s - self._since_s if self._times and world == self._world else 0.0

    @property
    def stands_later(self) -> bool:
        """Whether this node lets the others campaign first, since its coordinator stepped down."""
        return self._times > 0
