"""When the workers of a node have made their first step in a world, for the event log.

The status pages say it, so the workers do nothing for this. The agent reads them more often at the
beginning of a world than later: recovery in place takes tens of milliseconds, a restart a minute.
A script that reports no steps is never found to train.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastane.agent.control_sockets import ControlSockets
from elastane.agent.worker import LocalWorker, SpawnTask
from elastane.process.status_page import StatusPage
from elastane.protocol.hangs import Activity
from elastane.protocol.model import Fence, Joining

# The time between two looks: this share of the time since the world began, within the bounds. So a
# measured time is at most 2% too late, beyond the shortest pause.
_LOOK_SHARE = 0.02
_LOOK_MIN_S = 0.005
_LOOK_MAX_S = 0.25


@dataclass(slots=True)
class Beginning:
    """When the members of one world had a process group, the state, and a first step there."""

    round: int
    trained_s: float = 0.0
    built_s: float | None = None
    healed_s: float | None = None
    _built: set[int] = field(default_factory=set)
    _healed: dict[int, int] = field(default_factory=dict)
    _trained: set[int] = field(default_factory=set)

    def look(self, pages: dict[int, StatusPage], now_s: float, *, counts_steps: bool) -> bool:
        """Record what the pages show; return whether all their workers have made a step.

        `counts_steps`: whether they are in the job's steps. Other scripts report each step in a
        world that they entered in place, or count their calls.
        """
        for pid, page in pages.items():
            if counts_steps:
                self._look_at_step(pid, page, now_s)
            elif page.calls and page.round in (0, self.round):
                self._trained.add(pid)
        self.trained_s = now_s
        return bool(pages) and pages.keys() <= self._trained

    def _look_at_step(self, pid: int, page: StatusPage, now_s: float) -> None:
        has_met = page.round == self.round
        if pid not in self._built and (has_met or page.activity == Activity.HEALING):
            self._built.add(pid)
            self.built_s = now_s
        if has_met and pid not in self._healed:
            self._healed[pid] = page.steps
            self.healed_s = now_s
        if has_met and page.steps > self._healed[pid]:
            self._trained.add(pid)


class FirstSteps:
    """Watches the `members` of a world until `found` receives how they began."""

    def __init__(
        self,
        members: Callable[[], list[LocalWorker]],
        sockets: ControlSockets,
        found: Callable[[Fence, Beginning], None],
        spawn: SpawnTask,
    ) -> None:
        self._members = members
        self._sockets = sockets
        self._found = found
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None

    def await_them(self, world: Fence) -> None:
        """Watch from now on for the first steps in `world`."""
        self.end()
        self._task = self._spawn(self._watch(world))

    def end(self) -> None:
        """Watch no more: the world has ended."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, world: Fence) -> None:
        began_s = time.monotonic()
        beginning = Beginning(world.round)
        while True:
            members = self._members()
            alive = {w.process.pid: w.page for w in members if w.process and w.is_alive}
            now_s = time.monotonic()
            is_unmodified = self._sockets.joining is not Joining.ANYTIME
            in_steps = bool(self._sockets.recoverable) and not is_unmodified
            if beginning.look(alive, now_s, counts_steps=in_steps) and len(alive) == len(members):
                self._found(world, beginning)
                return
            pause_s = _LOOK_SHARE * (now_s - began_s)
            await asyncio.sleep(min(max(pause_s, _LOOK_MIN_S), _LOOK_MAX_S))
