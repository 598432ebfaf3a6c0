"""What ends a world, and when each failure of it was, on the coordinator's one time line."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastane.protocol.diagnosis import Sighting
from elastane.protocol.model import Failure


@dataclass(slots=True, kw_only=True)
class Incident:
    """Why the world in force is being ended, and what was seen since it began."""

    at_s: float
    reason: str
    planned: bool
    seen: dict[tuple[str, int], Sighting] = field(default_factory=dict)  # of a node's local ranks
    departed: list[str] = field(default_factory=list)
    charged: bool = False  # the budget has paid for it

    def see(self, node_id: str, failures: tuple[Failure, ...], now_s: float) -> None:
        """Put `failures` of a node on the time line, each once and as early as a report says.

        Each report arrives late by an unknown delay, and repeats what earlier ones said. A known
        failure shows by how much this report was slower than the quickest: all of it is moved back
        by that, so that the failures of one node keep the order that its own clock gave them.
        """
        known = [
            self.seen[node_id, one.local_rank].at_s - (now_s - one.age_s)
            for one in failures
            if (node_id, one.local_rank) in self.seen
        ]
        slower_s = max(0.0, -min(known, default=0.0))
        for failure in failures:
            of, at_s = (node_id, failure.local_rank), now_s - failure.age_s - slower_s
            if of not in self.seen:
                self.seen[of] = Sighting(node_id=node_id, at_s=at_s, failure=failure)
            elif at_s < self.seen[of].at_s:
                self.seen[of] = msgspec.structs.replace(self.seen[of], at_s=at_s)

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """What was seen, in the order in which it was told."""
        return tuple(self.seen.values())

    @property
    def is_charged(self) -> bool:
        """Whether it uses the restart budget: failed workers do, departures never."""
        return bool(self.seen) and not self.planned and not self.departed
