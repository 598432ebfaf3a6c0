"""Minds the local workers while they live: those that hang, and those in uninterruptible sleep.

Owns the looks at their status pages and at /proc, and the end of a worker that hangs: it shows its
stack, is killed, and is reported as any worker that ended. `protocol.hangs` judges what hangs,
`uninterruptible` what is wedged in the kernel. It starts no worker and knows nothing of worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable

from elastane.agent import uninterruptible
from elastane.agent.control_sockets import Lines
from elastane.agent.failure_reports import LastWords
from elastane.agent.group_setup import GroupSetup, SpawnTask
from elastane.agent.uninterruptible import StuckWatch, states_of
from elastane.agent.worker import LocalWorker
from elastane.process.control_socket import Doing, StatusQuery
from elastane.process.process import EXIT_UNKNOWN, WorkerProcess
from elastane.protocol.hangs import Activity, HangWatch, Sight
from elastane.protocol.limits import HANG_LOOK_S, HANG_STACK_S
from elastane.protocol.model import Failure, WaitPoint

_log = logging.getLogger("elastane.workers")
SLUG = "worker-hung"
_ACTIVITIES = {int(known): known for known in Activity}


class Minder:
    """`members` have a place in the world; `failed` hears of one given up though it may live."""

    def __init__(
        self,
        members: Callable[[], list[LocalWorker]],
        lines: Lines,
        failed: Callable[[Failure, float], None],
        spawn: SpawnTask,
        setup: GroupSetup,
    ) -> None:
        self._members, self._lines = members, lines
        self._failed, self._spawn = failed, spawn
        self._stuck = StuckWatch(setup.stuck_s)
        self._hangs = HangWatch(setup.hang_floor_s)
        self._marks: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        # Where all members wait for others, once nothing has moved for a while; and whether nothing
        # will come of it.
        self.waiting: tuple[WaitPoint, ...] = ()
        self.all_wait = False

    def begin(self, workers: Iterable[LocalWorker]) -> None:
        """Look at the members from now on, and at `workers` for uninterruptible sleep."""
        lines = self._lines
        lines.answered = self._answered
        self._tasks.append(self._spawn(self._mind_hangs()))
        if self._stuck.limit_s > 0:
            self._tasks.append(self._spawn(self._mind_stuck(workers)))

    def end(self) -> None:
        """Look no more: the group is stopped."""
        for task in self._tasks:
            task.cancel()
        self.waiting, self.all_wait = (), False

    def world_ended(self) -> None:
        """The members' world has ended: what they were at is cut short."""
        self._hangs.world_ended()
        self.waiting, self.all_wait = (), False

    async def _mind_hangs(self) -> None:
        while True:
            await asyncio.sleep(HANG_LOOK_S)
            members = self._members()
            alive = {w.process.pid: w for w in members if w.process and w.is_alive and w.page.mark}
            found = self._hangs.look(self._sights(alive), time.monotonic())
            are_all = len(alive) == len(members)
            self.waiting, self.all_wait = (
                found.waiting if are_all else (),
                found.stalled and are_all,
            )
            for pid in found.ask:
                self._lines.send(alive[pid].local_rank, StatusQuery())
            for pid, reason in found.hung.items():
                worker, process = alive[pid], alive[pid].process
                if process is not None and not (worker.hung or worker.given_up):
                    worker.hung = f"it hung: {reason} [{SLUG}]"
                    _log.warning("worker of local rank %d: %s", worker.local_rank, worker.hung)
                    self._spawn(self._end(worker, process))

    def _sights(self, alive: dict[int, LocalWorker]) -> dict[int, Sight]:
        """Return what each shows; the kernel is only asked for those that made no progress."""
        marks = {pid: worker.page.mark for pid, worker in alive.items()}
        still = [pid for pid, mark in marks.items() if self._marks.get(pid) == mark]
        states, self._marks = states_of(still), marks
        return {
            pid: Sight(
                mark=marks[pid],
                activity=_ACTIVITIES.get(worker.page.activity, Activity.APART),
                steps=worker.page.steps,
                stopped=states.get(pid) == "T",
                held=states.get(pid) == "t",
            )
            for pid, worker in alive.items()
        }

    def _answered(self, local_rank: int, doing: Doing) -> None:
        for worker in self._members():
            if worker.local_rank == local_rank and worker.process is not None:
                pid = worker.process.pid
                at = WaitPoint(doing.rank, doing.where)
                self._hangs.answered(
                    *(pid,), waits=doing.waits, held=doing.held, at=at, traffic=doing.traffic
                )

    async def _end(self, worker: LocalWorker, process: WorkerProcess) -> None:
        """Have it show its stack, and kill it with what it started; nothing may keep us."""
        process.abort()
        if not await _ended(process):
            process.kill_group(signal.SIGKILL)
            if not await _ended(process) and not worker.given_up:
                self._give_up(worker, process.pid, f"killed, and lives on; {worker.hung}")
        process.kill_group(signal.SIGKILL)

    async def _mind_stuck(self, workers: Iterable[LocalWorker]) -> None:
        """Hold a worker for failed that has been in uninterruptible sleep for too long."""
        watch = self._stuck
        while True:
            await asyncio.sleep(watch.pause_s)
            alive = {w.process.pid: w for w in workers if w.process and w.is_alive}
            for pid in watch.look(states_of(alive), time.monotonic()):
                if not alive[pid].given_up:
                    text = (
                        f"in uninterruptible sleep for {watch.limit_s:g} s [{uninterruptible.SLUG}]"
                    )
                    self._give_up(alive[pid], pid, text)

    def _give_up(self, worker: LocalWorker, pid: int, text: str) -> None:
        worker.given_up = True
        self._failed(worker.failure(pid, EXIT_UNKNOWN, LastWords(text)), time.monotonic())


async def _ended(process: WorkerProcess) -> bool:
    """Wait for the end of a process for as long as a hung one may take for its stack."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_STACK_S):
            await process.wait()
    return process.exit_code is not None
