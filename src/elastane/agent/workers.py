"""The local worker group of one attempt, as processes.

Owns their start, their end, and that nothing of them is left afterwards. It decides nothing: it
posts what happened as events, and does what the core's effects say. A worker that cannot be
started is a failed worker, with the error as its message. One that no signal ends is given up
where TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT says when: `lost` then tells why this node is
unfit for further workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from elastane.agent.files import choose_files
from elastane.agent.groupsetup import GroupSetup
from elastane.agent.lastwords import STOPPED_IN_ITS_END, LastWords
from elastane.agent.memory import Memory, kill_evidence, read_memory
from elastane.agent.offers import OfferedPort
from elastane.agent.overdue import end_overdue
from elastane.agent.pgstore import GroupStore
from elastane.agent.stuck import SLUG, StuckWatch, states_of
from elastane.agent.worker import EXIT_NOT_STARTED, Worker
from elastane.core.events import (
    AgentEvent,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupStarted,
    Signalled,
    WorkerFailed,
    WorkerSucceeded,
)
from elastane.core.model import Assignment, Failure, Offer
from elastane.errors import ElastaneError
from elastane.runtime.page import Page
from elastane.runtime.process import EXIT_UNKNOWN, WorkerProcess
from elastane.runtime.strays import kill_strays
from elastane.runtime.streams import GroupStreams, process_console
from elastane.runtime.timers import TimerRequest

_log = logging.getLogger("elastane.workers")
# How often a drain looks at the pages of its workers; only while a drain lasts.
_DRAIN_POLL_S = 0.002
# A SIGKILLed process in uninterruptible sleep may take its time; then it is reported, not hidden.
_KILL_WAIT_S = 5.0


@dataclass
class WorkerGroup:
    """One start of the local workers; `post` takes the events."""

    setup: GroupSetup
    assignment: Assignment
    port: OfferedPort
    post: Callable[[AgentEvent], None]
    lost: str = ""
    _workers: list[Worker] = field(default_factory=list)
    _memory: Memory = field(default_factory=Memory)
    _store: GroupStore | None = None
    _streams: GroupStreams | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _starting: asyncio.Task[None] | None = None
    _minding: asyncio.Task[None] | None = None
    _stuck_mind: asyncio.Task[None] | None = None
    _kill: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False
    _stopped_s: float = 0.0

    def begin(self) -> None:
        """Start the workers in the background; `GroupStarted` and their ends are posted."""
        if self.setup.timers is not None:
            self.setup.timers.expire = self._expire
        self._starting = self._spawn_task(self._start())

    def stop(self, grace_s: float) -> None:
        """Stop the workers in the background; a later call may shorten the grace."""
        if grace_s <= 0:
            self._kill.set()
        else:
            handle = asyncio.get_running_loop().call_later(grace_s, self._kill.set)
            _log.debug("grace of %.1f s ends at %s", grace_s, handle.when())
        if not self._stopping:
            self._stopping, self._stopped_s = True, time.monotonic()
            self._spawn_task(self._stop())

    def mark(self) -> None:
        """Gate the workers that ask should_checkpoint(), and post how far the furthest is."""
        for worker in self._workers:
            worker.page.gate()
        calls = max((w.page.calls for w in self._workers if w.is_alive), default=0)
        self.post(GroupMarked(self.assignment.fence, calls or None))

    def aim(self, calls: int | None) -> None:
        """Have all workers checkpoint: at call number `calls`, or on SIGTERM if they catch it."""
        self._spawn_task(self._drain(calls))

    def progress(self) -> int | None:
        """Return the least call count of the workers that ask should_checkpoint()."""
        counts = [w.page.calls for w in self._workers if w.is_alive]
        return min(counts) if counts and all(counts) else None

    async def _start(self) -> None:
        fence, run = self.assignment.fence, self.setup.run
        self._memory = read_memory()
        self._streams = GroupStreams(
            self.setup.logs, run.job, run.node_id, fence, self.setup.offload
        )
        try:
            if self.assignment.agent_store and self.assignment.node_rank == 0:
                await self._start_store()
            await choose_files(self.setup, self.assignment, self._streams)
            for local_rank in range(run.local_world_size):
                await self._start_one(local_rank)
                if self._stopping:
                    break
        finally:
            self._streams.close_worker_ends()
        if self.setup.stuck_s > 0:
            self._stuck_mind = self._spawn_task(self._mind_stuck())
        pids = tuple(w.process.pid for w in self._workers if w.process is not None)
        self.post(GroupStarted(fence, pids))

    async def _start_store(self) -> None:
        self._store = GroupStore(self.setup.spawner, self.port, self._store_failed)
        await self._store.start()
        self._minding = self._spawn_task(self._store.mind())

    def _store_failed(self, reason: str) -> None:
        rank = self.assignment.rank_base
        failure = Failure(
            local_rank=0, rank=rank, pid=0, exit_code=EXIT_NOT_STARTED, message=reason
        )
        self.post(WorkerFailed(self.assignment.fence, failure))

    async def _start_one(self, local_rank: int) -> None:
        assert self._streams is not None
        rank = self.assignment.rank_base + local_rank
        streams = await self._streams.open_soon(local_rank, rank, self.setup.run.role)
        worker = Worker(
            local_rank, rank, streams, Page.create(), self._streams.chosen_env(local_rank)
        )
        self._workers.append(worker)
        command = worker.command(self.setup, self.assignment)
        try:
            worker.process = await self.setup.spawner.spawn(command)
        except (ElastaneError, OSError) as error:
            failure = worker.failure(0, EXIT_NOT_STARTED, LastWords(f"not started: {error}"))
            self.post(WorkerFailed(self.assignment.fence, failure))
            return
        self._watches.add(self._spawn_task(self._watch(worker, worker.process)))

    async def _watch(self, worker: Worker, process: WorkerProcess) -> None:
        code = await process.wait()
        ended_s = time.monotonic()
        if self.setup.timers is not None:
            self.setup.timers.forget(process.pid)
        if worker.given_up:
            return  # Its failure was told when it was held for lost.
        if code == 0:
            self.post(WorkerSucceeded(self.assignment.fence, worker.local_rank))
            return
        assert self._streams is not None
        stopped = self._stopping
        words = await worker.last_words(self.setup, self._streams)
        evidence = ""
        if stopped and 0 < words.failed_s <= self._stopped_s:
            evidence = STOPPED_IN_ITS_END
        elif not (stopped or worker.verdict):
            evidence = kill_evidence(self._memory, read_memory(), process.peak_bytes, code)
        # The error file's time is the fault's own; its process ended by and by after that.
        failed_s = min(ended_s, words.failed_s or ended_s)
        age_s = time.monotonic() - failed_s
        failure = worker.failure(process.pid, code, words, age_s, evidence)
        self.post(WorkerFailed(self.assignment.fence, failure))

    async def _mind_stuck(self) -> None:
        """Hold a worker for failed that has been in uninterruptible sleep for too long."""
        watch = StuckWatch(self.setup.stuck_s)
        while not self._stopping:
            await asyncio.sleep(watch.pause_s)
            alive = {w.process.pid: w for w in self._workers if w.process and w.is_alive}
            for pid in watch.look(states_of(alive), time.monotonic()):
                worker = alive[pid]
                if worker.given_up or self._stopping:
                    continue
                worker.given_up = True
                text = f"in uninterruptible sleep for {watch.limit_s:g} s [{SLUG}]"
                failure = worker.failure(pid, EXIT_UNKNOWN, LastWords(text))
                self.post(WorkerFailed(self.assignment.fence, failure))

    def _expire(self, request: TimerRequest) -> bool:
        return end_overdue(self._workers, request)

    async def _drain(self, calls: int | None) -> None:
        for worker in self._workers:
            if calls is not None:
                worker.page.aim(calls)
            elif worker.process is not None and worker.process.catches(signal.SIGTERM):
                worker.termed = True
                worker.process.send_signal(signal.SIGTERM)
        # A page of memory has no event that could be waited for.
        while not self._stopping and any(  # noqa: ASYNC110
            self._is_busy(w, calls) for w in self._workers
        ):
            await asyncio.sleep(_DRAIN_POLL_S)
        if not self._stopping:
            self.post(GroupDrained(self.assignment.fence))

    @staticmethod
    def _is_busy(worker: Worker, calls: int | None) -> bool:
        if not worker.is_alive:
            return False
        return worker.termed if calls is None else not worker.page.is_parked

    async def _stop(self) -> None:
        if self._store is not None:
            self._store.end()
        await self._end_start()
        if self._stuck_mind is not None:
            self._stuck_mind.cancel()
        alive = [w.process for w in self._workers if w.process is not None and w.is_alive]
        for worker in self._workers:
            # One that was asked to checkpoint by SIGTERM is not asked twice.
            if worker.process is not None and worker.is_alive and not worker.termed:
                worker.process.send_signal(signal.SIGTERM)
        ended = asyncio.create_task(_wait_all(alive))
        kill = asyncio.create_task(_wait_set(self._kill))
        await asyncio.wait({ended, kill}, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill_group(signal.SIGKILL)
        await self._reap(ended)
        await self._finish()

    async def _end_start(self) -> None:
        """Wait for the start in hand; one that waits for a zygote's imports is given up."""
        assert self._starting is not None, "begin() comes first"
        if not self.setup.spawner.warm.is_set():
            self._starting.cancel()
        await asyncio.wait({self._starting})
        if self._store is not None:
            self._store.end()

    async def _reap(self, ended: asyncio.Task[None]) -> None:
        """Wait for what was killed; what a worker left behind is killed as well."""
        if self._store is not None:
            self._store.kill()
        await self._wait_killed(ended)
        if self._minding is not None:
            await asyncio.wait({self._minding})
        if self._watches:
            # Each says how its worker ended, within a bound; of a group that is gone nobody hears.
            await asyncio.wait(self._watches)
        strays = await kill_strays()
        if strays:
            _log.info("killed %d processes that workers had left behind", strays)

    async def _wait_killed(self, ended: asyncio.Task[None]) -> None:
        """Wait for the end of what was killed; `lost` is why it was not waited for."""
        if await _within(ended, _KILL_WAIT_S):
            return
        limit_s = self.setup.stuck_s
        bound = f"for {limit_s:g} s more" if limit_s else "for as long as it takes"
        _log.error(
            "workers %s were killed but do not end (uninterruptible sleep in the kernel?);"
            " waiting %s [%s]",
            self._alive_pids(),
            bound,
            SLUG,
        )
        if await _within(ended, limit_s or None):
            return
        self.lost = f"workers {self._alive_pids()} cannot be killed"
        ended.cancel()
        for watch in self._watches:
            watch.cancel()
        self.post(Signalled(f"this node is unfit: {self.lost}"))

    def _alive_pids(self) -> list[int]:
        return [w.process.pid for w in self._workers if w.process is not None and w.is_alive]

    async def _finish(self) -> None:
        if self._streams is not None:
            await self._streams.finish()
        for worker in self._workers:
            worker.page.close()
        self.post(GroupGone(self.assignment.fence, self._next_offer()))

    def _next_offer(self) -> Offer:
        """Hold a new port: this attempt's may still be known to somebody."""
        self.port.close()
        return self.port.open()

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Our bug; the agent must not live on with a group that nobody watches.
            _log.critical("the worker group's task failed", exc_info=task.exception())
            process_console(2).wait_empty(1.0)  # Its thread ends with this process.
            os.kill(os.getpid(), signal.SIGABRT)


async def _wait_all(processes: list[WorkerProcess]) -> None:
    for process in processes:
        await process.wait()


async def _wait_set(event: asyncio.Event) -> None:
    await event.wait()


async def _within(task: asyncio.Task[None], limit_s: float | None) -> bool:
    """Wait for `task`, which goes on if it takes longer; tell whether it is done."""
    await asyncio.wait({task}, timeout=limit_s)
    return task.done()
