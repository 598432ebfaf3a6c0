"""Finds where another run of a job begins in the log that holds all runs under its name. Pure.

A run that has ended says so. A run whose agents were killed has no end in the log; without a store
the next one begins to count worlds again. So does a new coordinator without a store, if the one
before was lost as it settled a world. Then some agents of the world are older than that.
"""

from __future__ import annotations

from typing import Self

import msgspec

from elastane.observe.events import LoggedEvent
from elastane.protocol.log_events import EventKind

_Fence = tuple[int, int]


class RunTrack(msgspec.Struct, frozen=True):
    """The agents and the newest world of the current run.

    Orders are those of the events in the log, since clocks of hosts differ. `agents`: the order and
    the time of each node's newest start; those of earlier worlds are dropped.
    """

    order: int = 0
    agents: dict[str, tuple[int, float]] = {}
    fence: _Fence = (-1, -1)
    settled: int = 0

    def after(self, event: LoggedEvent, *, is_over: bool) -> tuple[Self, bool]:
        """Return the track after an event, and whether that event is the first of another run.

        `is_over`: the current run has ended.
        """
        changed = msgspec.structs.replace
        if event.kind == EventKind.AGENT_STARTED:
            order = self.order + 1
            agents = {**self.agents, event.node: (order, event.time_s)}
            return changed(self, order=order, agents=agents), False
        if event.kind == EventKind.COORDINATOR_STARTED and is_over:
            return changed(self, fence=(-1, -1), agents=self.newer()), True
        if event.kind != EventKind.ROUND_SETTLED or event.round is None or event.attempt is None:
            return self, False
        fence, order = (event.round, event.attempt), self.order + 1
        members = event.text("members").split()
        newer = self.newer()
        is_older = any(name in self.agents and name not in newer for name in members)
        begins = fence <= self.fence and not is_older and any(name in newer for name in members)
        if fence < self.fence and not begins:
            return self, False
        kept = {name: at for name, at in self.agents.items() if name in members}
        agents = {**kept, **newer}
        return changed(self, order=order, agents=agents, fence=fence, settled=order), begins

    def newer(self) -> dict[str, tuple[int, float]]:
        """Return the agents that have started since the newest world was settled."""
        return {name: at for name, at in self.agents.items() if at[0] > self.settled}

    def newer_s(self) -> float | None:
        """Return when the first of these agents started; None if there is none."""
        return min((time_s for _, time_s in self.newer().values()), default=None)
