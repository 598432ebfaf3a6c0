"""A drain of one local worker group: its workers reach one common call, or end by SIGTERM.

Owns the gates of their status pages during the drain. It reports how far the workers are, and when
all have arrived. A worker that neither asks should_checkpoint() nor catches SIGTERM is not waited
for.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from elastane.agent.control_sockets import ControlSockets
from elastane.agent.worker import LocalWorker, SpawnTask
from elastane.protocol.events import AgentEvent, GroupDrained, GroupMarked
from elastane.protocol.model import Fence

# How often a drain reads the pages of its workers; only while a drain lasts.
_POLL_S = 0.002


class GroupDrain:
    """`members` returns the workers of the current world; `spawn` starts a supervised task."""

    def __init__(
        self,
        members: Callable[[], Sequence[LocalWorker]],
        sockets: ControlSockets,
        post: Callable[[AgentEvent], None],
        spawn: SpawnTask,
    ) -> None:
        self._members, self._sockets, self._post, self._spawn = members, sockets, post, spawn
        self._task: asyncio.Task[None] | None = None

    def mark(self, world: Fence) -> None:
        """Gate the workers that ask should_checkpoint(), and report the furthest call."""
        members = self._members()
        for worker in members:
            worker.page.gate()
        calls = max((w.page.calls for w in members if w.is_alive), default=0)
        self._post(GroupMarked(world, calls or None))

    def aim(self, world: Fence, calls: int | None, *, stops: bool) -> None:
        """Have all workers checkpoint: at call number `calls`, or on SIGTERM if they catch it.

        Workers that recover in place checkpoint only if the drain `stops` them all.
        """
        self.cancel()
        self._task = self._spawn(self._drain(world, calls, self._members(), stops=stops))

    def cancel(self) -> None:
        """Report nothing more: the workers are stopped, or in another world."""
        if self._task is not None:
            self._task.cancel()

    def progress(self) -> int | None:
        """Return the smallest call count of the workers that ask should_checkpoint()."""
        counts = [w.page.calls for w in self._members() if w.is_alive]
        return min(counts) if counts and all(counts) else None

    def met(self) -> int:
        """Return the smallest round in which a worker last met all others of its world."""
        return min((w.page.round for w in self._members() if w.is_alive), default=0)

    async def _drain(
        self, world: Fence, calls: int | None, members: Sequence[LocalWorker], *, stops: bool
    ) -> None:
        for worker in members:
            if calls is not None:
                worker.page.aim(calls, stops=stops)
            elif worker.process is not None and worker.process.catches(signal.SIGTERM):
                worker.got_sigterm = True
                worker.process.send_signal(signal.SIGTERM)
        # A page of shared memory has no event to wait for.
        while any(self._is_busy(w, calls, stops=stops) for w in members):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._post(GroupDrained(world, stops))

    def _is_busy(self, worker: LocalWorker, calls: int | None, *, stops: bool) -> bool:
        if not worker.is_alive or worker.local_rank in self._sockets.finished:
            return False
        if calls is None:
            return worker.got_sigterm
        return not (worker.page.has_saved if stops else worker.page.is_parked)
