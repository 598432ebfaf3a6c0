"""Watches the local workers for hangs, for uninterruptible sleep, and for ends that take long.

Owns the reads of their status pages and of /proc, and ends a worker that hangs. Such a worker
prints its stacks, is killed, and is reported like any other failed worker. `protocol.hangs` judges
what hangs, `StuckWatch` what is stuck in the kernel, `EndingWatch` what lives on after an error. It
starts no worker and knows no worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastane.agent.control_sockets import ControlSockets
from elastane.agent.failure_reports import LastWords
from elastane.agent.pauses import PauseWatch
from elastane.agent.standstill import MonitorPosts, StandstillWatch
from elastane.agent.step_paces import StepPaces
from elastane.agent.worker import GroupSetup, LocalWorker, SpawnTask
from elastane.process.control_socket import Doing, StatusQuery
from elastane.process.process import EXIT_UNKNOWN, WorkerProcess
from elastane.process.unanswered import UnansweredWatch
from elastane.protocol.culprits import LOOK_MAX_S
from elastane.protocol.diagnosis import headline, without_noise
from elastane.protocol.hangs import HANG_LOOK_S, Activity, HangRules, Observation
from elastane.protocol.model import WaitPoint
from elastane.protocol.stragglers import Pace

# A hanging worker gets SIGABRT for its stack, and SIGKILL after this. If SIGKILL does not end it
# within the same time again, it is reported as failed while it lives.
HANG_STACK_S = 0.5

_log = logging.getLogger("elastane.workers")
HUNG_SLUG = "worker-hung"
UNKILLABLE_SLUG = "worker-unkillable"
LIVES_ON_SLUG = "worker-lives-on"
# A process that lives on for this long after its error is reported. The interpreter and torch take
# 0.3 to 0.6 s for the end (2 cores of an AMD EPYC, torch 2.13, 2026-12-01).
ERROR_TOLD_S = 2.0
_ACTIVITIES = {int(known): known for known in Activity}
# The agent reads the paces of its workers at every second look for hangs.
_PACE_LOOKS = 2
# How many looks fit into the limit; torch's agent looks ten times a second.
_LOOKS = 8
_PAUSE_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Waits:
    """Where the members of a world wait, once all have waited for others for a while.

    `forever`: the wait never ends.
    """

    at: tuple[WaitPoint, ...] = ()
    forever: bool = False


class HangMonitor:
    """Watches the `members` of a world; `post` receives what it finds."""

    def __init__(
        self,
        members: Callable[[], list[LocalWorker]],
        sockets: ControlSockets,
        post: MonitorPosts,
        spawn: SpawnTask,
        setup: GroupSetup,
    ) -> None:
        self._members = members
        self._sockets = sockets
        self._failed = post.failed
        self._standstill = StandstillWatch(setup, post)
        self._spawn = spawn
        self._setup = setup
        self._stuck = StuckWatch(setup.stuck_s)
        self._endings = EndingWatch(setup.error_exit_limit_s)
        self._hangs = HangRules(setup.hang_floor_s, setup.abort_limit_s)
        self._progress_marks: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._step_paces = StepPaces()
        self._pauses = PauseWatch(post.paused)
        self._looks = 0
        self.waits = Waits()
        self.paces: tuple[Pace, ...] = ()
        # The addresses that do not answer the workers.
        self.unanswered = UnansweredWatch()

    def begin(self, workers: Iterable[LocalWorker]) -> None:
        """Watch the members for hangs from now on, and `workers` for all else."""
        self._tasks.append(self._spawn(self._watch_hangs(workers)))
        if self._stuck.limit_s > 0:
            self._tasks.append(self._spawn(self._watch_stuck(workers)))

    def end(self) -> None:
        """Stop watching: the group is stopped."""
        for task in self._tasks:
            task.cancel()
        self.waits = Waits()

    def world_ended(self) -> None:
        """Forget what the members waited for: their world has ended."""
        self._hangs.world_ended()
        self._standstill.world_ended()
        self._endings.world_ended()
        self.waits, self.paces = Waits(), ()
        self.unanswered.forget()

    async def _watch_hangs(self, workers: Iterable[LocalWorker]) -> None:
        while True:
            await asyncio.sleep(HANG_LOOK_S)
            members = self._members()
            alive = {w.process.pid: w for w in members if w.process and w.is_alive and w.page.mark}
            found = self._hangs.look(self._observations(alive), time.monotonic())
            are_all = len(alive) == len(members)
            self.waits = Waits(found.waiting, found.stalled) if are_all else Waits()
            for pid in found.ask:
                self._sockets.send(alive[pid].local_rank, StatusQuery())
            for pid, reason in found.hung.items():
                self._standstill.describe(alive[pid], reason)
                self._end_hung(alive[pid], reason)
            if not self._look_at_endings(members, workers):
                self._standstill.look(members, time.monotonic(), all_wait=bool(self.waits.at))
            pids = [w.process.pid for w in members if w.process and w.is_alive]
            self.unanswered.look(pids, time.monotonic())
            self._looks += 1
            if self._looks % _PACE_LOOKS == 0:
                self.paces = self._step_paces.look(members)
                self._pauses.look(members, time.monotonic())

    def _look_at_endings(
        self, members: Iterable[LocalWorker], workers: Iterable[LocalWorker]
    ) -> bool:
        """Report the first member that lives on after its error, and end workers that still do.

        Return whether a member does, so that it is known for whom the others wait.
        """
        alive = {w.process.pid: w for w in workers if w.process and w.is_alive and w.page.error_ns}
        now_s = time.monotonic()
        over = self._endings.look({pid: w.page.error_ns for pid, w in alive.items()}, now_s)
        here = {w.process.pid for w in members if w.process}
        first = self._endings.to_tell(here)
        if first is not None:
            self._spawn(self._tell_error(alive[first], self._endings.lived_s(first)))
        for pid in over:
            self._end_after_error(alive[pid])
        return not here.isdisjoint(alive)

    async def _tell_error(self, worker: LocalWorker, lived_s: float) -> None:
        words = await worker.last_words(self._setup)
        # The output of one that has called sys.exit(1) need not have to do with that.
        error = "" if words.output else without_noise(headline(words.message))
        self._standstill.describe_end(worker, error, lived_s)

    def _end_after_error(self, worker: LocalWorker) -> None:
        process, limit_s = worker.process, self._endings.limit_s
        if process is not None and not (worker.ended_because or worker.given_up):
            worker.blame(f"by its agent, {limit_s:g} s after its error [{LIVES_ON_SLUG}]")
            _log.warning(
                "worker of local rank %d: ended %s", worker.local_rank, worker.ended_because
            )
            self._spawn(self._end(worker, process))

    def end_rank(self, rank: int, reason: str) -> None:
        """End the worker of this rank, if it is here and no other hang rule watches it."""
        for worker in self._members():
            if worker.rank == rank and worker.is_alive and not worker.page.mark:
                self._end_hung(worker, reason)

    def _end_hung(self, worker: LocalWorker, reason: str) -> None:
        process = worker.process
        if process is not None and not (worker.hung or worker.given_up):
            worker.find_hung(f"it hung: {reason} [{HUNG_SLUG}]")
            _log.warning("worker of local rank %d: %s", worker.local_rank, worker.hung)
            self._spawn(self._end(worker, process))

    def _observations(self, alive: dict[int, LocalWorker]) -> dict[int, Observation]:
        """Return what each worker shows; the kernel is asked only about those without progress."""
        marks = {pid: worker.page.mark for pid, worker in alive.items()}
        still = [pid for pid, mark in marks.items() if self._progress_marks.get(pid) == mark]
        states = states_of(still)
        self._progress_marks = marks
        return {
            pid: Observation(
                mark=marks[pid],
                activity=_ACTIVITIES.get(worker.page.activity, Activity.APART),
                steps=worker.page.steps,
                stopped=states.get(pid) == "T",
                held=states.get(pid) == "t",
                aborts=worker.page.aborts,
            )
            for pid, worker in alive.items()
        }

    def answered(self, local_rank: int, doing: Doing) -> None:
        """Record a worker's answer to a StatusQuery."""
        for worker in self._members():
            if worker.local_rank == local_rank and worker.process is not None:
                pid = worker.process.pid
                at = WaitPoint(doing.rank, doing.where)
                self._hangs.answered(
                    pid, waits=doing.waits, held=doing.held, at=at, traffic=doing.traffic
                )

    async def _end(self, worker: LocalWorker, process: WorkerProcess) -> None:
        """Make the worker print its stacks, then kill it with its children; never wait for long.

        One that lives on after an error has printed its traceback, which its stacks would bury.
        """
        if worker.hung:
            process.abort()
        if not worker.hung or not await _ended(process):
            process.kill_group(signal.SIGKILL)
            if not await _ended(process) and not worker.given_up:
                self._give_up(
                    worker,
                    process.pid,
                    f"killed, but still alive; {worker.hung or worker.ended_because}",
                )
        process.kill_group(signal.SIGKILL)

    async def _watch_stuck(self, workers: Iterable[LocalWorker]) -> None:
        """Report a worker as failed that has been in uninterruptible sleep for too long."""
        watch = self._stuck
        while True:
            await asyncio.sleep(watch.pause_s)
            alive = {w.process.pid: w for w in workers if w.process and w.is_alive}
            for pid in watch.look(states_of(alive), time.monotonic()):
                if not alive[pid].given_up:
                    text = f"in uninterruptible sleep for {watch.limit_s:g} s [{UNKILLABLE_SLUG}]"
                    self._give_up(alive[pid], pid, text)

    def _give_up(self, worker: LocalWorker, pid: int, text: str) -> None:
        worker.give_up()
        self._failed(worker.failure(pid, EXIT_UNKNOWN, LastWords(text)), time.monotonic())


async def _ended(process: WorkerProcess) -> bool:
    """Wait for the end of a process for as long as a hung one may take to print its stacks."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_STACK_S):
            await process.wait()
    return process.exit_code is not None


class StuckWatch:
    """Finds the processes in uninterruptible sleep (state D) at every look for `limit_s`.

    No signal reaches them; a stuck driver or network file system causes it.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.pause_s = min(_PAUSE_MAX_S, limit_s / _LOOKS)
        self._since_s: dict[int, float] = {}

    def look(self, states: Mapping[int, str], now_s: float) -> list[int]:
        """Record the state of each living process; return those that are given up."""
        since_s = self._since_s
        self._since_s = {
            pid: since_s.get(pid, now_s) for pid, state in states.items() if state == "D"
        }
        return [pid for pid, first_s in self._since_s.items() if now_s - first_s >= self.limit_s]


class EndingWatch:
    """Finds the processes that live on after an error has ended their program.

    A thread, an exit handler or a destructor may keep one alive, while the others wait for it. A
    longer time between two looks counts as LOOK_MAX_S, since the host may have been suspended.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._is_told = False
        self._errors_ns: Mapping[int, int] = {}
        self._lived_s: dict[int, float] = {}
        self._looked_s = 0.0

    def look(self, errors_ns: Mapping[int, int], now_s: float) -> list[int]:
        """Record the living processes with the time of their errors; return those to be ended."""
        passed_s = min(now_s - self._looked_s, LOOK_MAX_S)
        self._looked_s, self._errors_ns = now_s, errors_ns
        self._lived_s = {
            pid: self._lived_s[pid] + passed_s if pid in self._lived_s else 0.0 for pid in errors_ns
        }
        return [pid for pid, lived_s in self._lived_s.items() if lived_s >= self.limit_s]

    def lived_s(self, pid: int) -> float:
        """Return for how long a process has been seen to live since its error."""
        return self._lived_s[pid]

    def to_tell(self, members: Collection[int]) -> int | None:
        """Return the process to report: of this world's members the one with the first error.

        One report suffices, since errors of others most often follow from it.
        """
        late = [pid for pid in members if self._lived_s.get(pid, 0.0) >= ERROR_TOLD_S]
        if self._is_told or not late:
            return None
        self._is_told = True
        return min(late, key=lambda pid: self._errors_ns[pid])

    def world_ended(self) -> None:
        """Let the next world have a report of its own."""
        self._is_told = False


def states_of(pids: Iterable[int]) -> dict[int, str]:
    """Return the state letter of each process that exists."""
    found = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        found[pid] = text.rpartition(") ")[2][:1]
    return found
