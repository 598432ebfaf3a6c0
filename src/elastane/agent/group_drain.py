"""A drain of one local worker group: its workers reach one call of theirs, or end by SIGTERM.

Owns the gates of their pages while it lasts. It posts how far they are and when all are there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from elastane.agent.control_sockets import Lines
from elastane.agent.group_setup import SpawnTask
from elastane.agent.worker import LocalWorker
from elastane.protocol.events import AgentEvent, GroupDrained, GroupMarked
from elastane.protocol.model import Fence

# How often a drain looks at the pages of its workers; only while a drain lasts.
_POLL_S = 0.002


class GroupDrain:
    """`members` are the workers of the world in force; `spawn` begins a task that is watched."""

    def __init__(
        self,
        members: Callable[[], Sequence[LocalWorker]],
        lines: Lines,
        post: Callable[[AgentEvent], None],
        spawn: SpawnTask,
    ) -> None:
        self._members, self._lines, self._post, self._spawn = members, lines, post, spawn
        self._task: asyncio.Task[None] | None = None

    def mark(self, world: Fence) -> None:
        """Gate the workers that ask should_checkpoint(), and post how far the furthest is."""
        members = self._members()
        for worker in members:
            worker.page.gate()
        calls = max((w.page.calls for w in members if w.is_alive), default=0)
        self._post(GroupMarked(world, calls or None))

    def aim(self, world: Fence, calls: int | None, *, stops: bool) -> None:
        """Have all workers checkpoint: at call number `calls`, or on SIGTERM if they catch it.

        Those that recover in place checkpoint only where it `stops` them all.
        """
        self.cancel()
        self._task = self._spawn(self._drain(world, calls, self._members(), stops=stops))

    def cancel(self) -> None:
        """Post nothing more: the workers are stopped, or in another world."""
        if self._task is not None:
            self._task.cancel()

    def progress(self) -> int | None:
        """Return the least call count of the workers that ask should_checkpoint()."""
        counts = [w.page.calls for w in self._members() if w.is_alive]
        return min(counts) if counts and all(counts) else None

    def met(self) -> int:
        """Return the least round in which its workers last met those of a whole world."""
        return min((w.page.round for w in self._members() if w.is_alive), default=0)

    async def _drain(
        self, world: Fence, calls: int | None, members: Sequence[LocalWorker], *, stops: bool
    ) -> None:
        for worker in members:
            if calls is not None:
                worker.page.aim(calls, stops=stops)
            elif worker.process is not None and worker.process.catches(signal.SIGTERM):
                worker.termed = True
                worker.process.send_signal(signal.SIGTERM)
        # A page of memory has no event that could be waited for.
        while any(self._is_busy(w, calls, stops=stops) for w in members):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._post(GroupDrained(world, stops))

    def _is_busy(self, worker: LocalWorker, calls: int | None, *, stops: bool) -> bool:
        if not worker.is_alive or worker.local_rank in self._lines.finished:
            return False
        if calls is None:
            return worker.termed
        return not (worker.page.has_saved if stops else worker.page.is_parked)
